# SPDX-License-Identifier: Apache-2.0
"""Training in JAX: where parameters and state are kept, and how they are updated."""

try:
    import jax as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("JAX is needed here: pip install 'exactqat[jax]'") from error
