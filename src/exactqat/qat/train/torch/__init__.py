# SPDX-License-Identifier: Apache-2.0
"""Training in PyTorch: where parameters and state are kept, and how they are updated."""
