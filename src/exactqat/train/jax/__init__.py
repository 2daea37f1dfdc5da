# SPDX-License-Identifier: Apache-2.0
"""Training in JAX: where parameters and state are kept, and how they are updated."""
