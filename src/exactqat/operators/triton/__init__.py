# SPDX-License-Identifier: Apache-2.0
"""GPU kernels in Triton, and the plans that launch them; frontends that hold arrays on a GPU run these.

The bits are those of the other rooms, whatever the card. Nothing waits for the device, so calls can be captured in CUDA
graphs; a given range that is not `input_min <= input_max`, which the other devices refuse, gives NaN.
"""

from functools import lru_cache

from exactqat.operators.declarations.op import Operator
from exactqat.operators.declarations.specification import Attributes, Lowering, TensorSpec

try:
    import triton as _  # noqa: F401
except ImportError as error:
    raise ImportError("exactqat needs Triton for tensors on a GPU: pip install 'exactqat[triton]'") from error

from exactqat.operators.triton import depthwise_conv2d, fake_quant, fused_batch_norm, quantize_and_dequantize  # noqa: F401
from exactqat.operators.triton.launch import PLANS, Plan, run

__all__ = ["PLANS", "Plan", "plan", "planned", "run"]


def plan(operands: tuple[TensorSpec, ...], lowered: Lowering) -> Plan:
    """The launches of one call; those with nothing to do, which a GPU would refuse, are left out."""
    if lowered.kernel not in PLANS:
        raise NotImplementedError(f"{lowered.kernel} has no GPU kernel")
    draft = PLANS[lowered.kernel](operands, lowered.results, lowered.numbers)
    return draft._replace(launches=tuple(launch for launch in draft.launches if launch.grid[0]))


@lru_cache(maxsize=4096)
def planned(op: Operator, operands: tuple[TensorSpec, ...], attributes: Attributes) -> tuple[Lowering, Plan]:
    """`op.lower` and the plan for it, remembered: a call with known shapes costs one look-up."""
    lowered = op.lower(operands, attributes)
    return lowered, plan(operands, lowered)
