# SPDX-License-Identifier: Apache-2.0
"""Arrays that callers give: made fit to be operands, and checked before results are written into them."""

from typing import TYPE_CHECKING, Any, NamedTuple

from exactqat.operators.declarations.specification import FLOATS, ITEM_SIZES, Lowering, TensorSpec, wide

if TYPE_CHECKING:
    from exactqat.operators.declarations.op import Operator


def dtypes_that_fit(op: "Operator", kept: list[str | None], otherwise: str) -> list[str]:
    """A dtype for each operand that goes with those of the arrays that keep theirs: that of the first of them that
    holds data, `otherwise` where there is none. `kept`: None for operands that become what fits."""
    leading = next(
        (dtype for name, dtype in zip(op.operands, kept, strict=True) if dtype and name not in op.ranges), ""
    )
    leading = leading if leading in FLOATS else otherwise
    return [
        dtype or (wide(leading) if name in op.ranges else leading)
        for name, dtype in zip(op.operands, kept, strict=True)
    ]


def guest(op: "Operator", name: str, array: Any) -> Any:
    """A NumPy array that other frameworks can read: real numbers in a dtype they support, dense, and writable, which
    they require."""
    kind, flags = array.dtype.kind, array.flags
    if kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{op.name}: {name} must contain real numbers, got an array of {array.dtype}")
    if kind == "f" and array.dtype.itemsize > 8:
        return array.astype("float64", order="C")
    # One without gaps may have negative strides where it has one element.
    dense = flags.c_contiguous and min(array.strides, default=0) >= 0
    if dense and flags.aligned and flags.writeable and array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="), order="C")


def unreadable(op: "Operator", name: str, error: Exception) -> Exception:
    """The error for an operand that no framework can convert to an array."""
    why = str(error).split("\n")[0]
    if why.startswith(op.name):  # it says all
        return error
    return ValueError(f"{op.name}: {name} must be an array, a number or a regular nest of numbers, got one with: {why}")


class Memory(NamedTuple):
    """An array's place in memory, as `check_out` needs it."""

    spec: TensorSpec
    address: int
    dense: bool  # row-major without gaps, in the machine's byte order
    writable: bool

    @property
    def end(self) -> int:
        return self.address + self.spec.size * ITEM_SIZES[self.spec.dtype]

    def overlaps(self, other: "Memory") -> bool:
        return self.address < other.end and other.address < self.end


def check_out_specs(op: "Operator", lowered: Lowering, out: list[TensorSpec]) -> None:
    """Refuse arrays for the results that are not like them."""
    for name, spec, array in zip(op.results, lowered.results, out, strict=True):
        if array != spec:
            wanted = f"{spec.dtype} of shape {list(spec.shape)}"
            raise ValueError(
                f"{op.name}: out for {name} must be {wanted}, got {array.dtype} of shape {list(array.shape)}"
            )


def out_is_not_dense(op: "Operator", name: str) -> ValueError:
    """The error for result memory that is not contiguous."""
    return ValueError(f"{op.name}: out for {name} must be a dense and writable array (row-major, native byte order)")


def check_out(op: "Operator", lowered: Lowering, operands: list[Memory], out: list[Memory]) -> None:
    """Refuse arrays for the results that do not match or whose memory is still needed."""
    check_out_specs(op, lowered, [array.spec for array in out])
    for i, (name, array) in enumerate(zip(op.results, out, strict=True)):
        where = f"{op.name}: out for {name}"
        if not array.dense or not array.writable:
            raise out_is_not_dense(op, name)
        for operand_name, operand in zip(op.operands, operands, strict=True):
            same = array.address == operand.address and array.spec == operand.spec
            if array.overlaps(operand) and not (same and i == 0 and operand_name in op.reuses):
                allowed = ", ".join(op.reuses) or "no operand"
                raise ValueError(
                    f"{where} shares memory with {operand_name}; the first result may only overwrite {allowed}"
                )
        for other_name, other in zip(op.results[:i], out, strict=False):
            if array.overlaps(other):
                raise ValueError(f"{where} shares memory with out for {other_name}")
