# SPDX-License-Identifier: Apache-2.0
"""What recognises steps in a network under construction, whatever framework the model is written in."""
