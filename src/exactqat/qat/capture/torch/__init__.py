# SPDX-License-Identifier: Apache-2.0
"""How `capture` reads what `torch.export` shows: one function for each operator says which steps it is."""
