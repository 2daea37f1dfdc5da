# SPDX-License-Identifier: Apache-2.0
"""Training in Keras: where parameters and state are kept, and how they are updated."""

try:
    import keras as _needed  # noqa: F401
except ImportError as error:
    missing = getattr(error, "name", None) or "keras"
    how = "pip install 'exactqat[keras]' and a backend: JAX, PyTorch or TensorFlow"
    if missing.partition(".")[0] != "keras":
        how = (
            f"its backend, {missing}, is not installed: pip install 'exactqat[keras]' {missing}, or let "
            "KERAS_BACKEND=jax, torch or tensorflow in the environment name another, before Keras is first imported"
        )
    raise ImportError(f"Keras 3 and its backend are needed here: {how} ({error})") from error
