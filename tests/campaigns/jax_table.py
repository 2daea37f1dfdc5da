# SPDX-License-Identifier: Apache-2.0
"""Every operator under every transformation of JAX: what each cell of the table in docs/jax.md says is tried out here.

`python tests/campaigns/jax_table.py --write` writes the table again; `--spread OPERATOR ...` prints, as JSON, the cells
that need several devices, which XLA only makes when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import virtual_devices

if __name__ == "__main__" and "--spread" in sys.argv:
    os.environ |= virtual_devices.environment(8)

import jax
import jax.numpy as jnp
import numpy as np
from bits import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exactqat as eq
from exactqat.operators import OPERATORS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "jax.md"
BEGIN, END = (
    "<!-- tests/campaigns/jax_table.py --write: begin -->",
    "<!-- tests/campaigns/jax_table.py --write: end -->",
)
BY_RAW_NAME = {op.raw_name: op for op in OPERATORS.values() if op.raw_name}
NONE = "–"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, *shape])).standard_normal(shape, np.float32)


X, G, VECTOR = 3 * normal(8, 4, 6, 4), normal(8, 4, 6, 4, seed=1), np.abs(normal(4)) + 0.5
RANGE = {"min": -VECTOR, "max": VECTOR}
ONE_RANGE = {"min": np.float32(-1), "max": np.float32(1.5)}
BOUNDS = {"input_min": np.float32(-1), "input_max": np.float32(1.5)}
NORM = {"scale": VECTOR, "offset": -VECTOR, "mean": VECTOR, "variance": VECTOR}
RESERVES = {f"reserve_space_{i}": VECTOR for i in (1, 2)}
CONV = {"strides": (1, 1, 1, 1), "padding": "SAME"}

# Operands (the first is data, one example for each image) and attributes.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FakeQuantWithMinMaxArgs": ({"inputs": X}, {}),
    "FakeQuantWithMinMaxArgsGradient": ({"gradients": G, "inputs": X}, {}),
    "FakeQuantWithMinMaxVars": ({"inputs": X, **ONE_RANGE}, {}),
    "FakeQuantWithMinMaxVarsGradient": ({"gradients": G, "inputs": X, **ONE_RANGE}, {}),
    "FakeQuantWithMinMaxVarsPerChannel": ({"inputs": X, **RANGE}, {}),
    "FakeQuantWithMinMaxVarsPerChannelGradient": ({"gradients": G, "inputs": X, **RANGE}, {}),
    "QuantizeAndDequantize": ({"input": X}, {"range_given": True, "input_min": -1.0, "input_max": 1.5}),
    "QuantizeAndDequantizeV2": ({"input": X, **BOUNDS}, {"range_given": True}),
    "QuantizeAndDequantizeV3": ({"input": X, **BOUNDS}, {"num_bits": 8}),
    "QuantizeAndDequantizeV4": ({"input": X, **BOUNDS}, {"range_given": True}),
    "QuantizeAndDequantizeV4Grad": ({"gradients": G, "input": X, **BOUNDS}, {}),
    "FusedBatchNorm": ({"x": X, **NORM}, {}),
    "FusedBatchNormV2": ({"x": X, **NORM}, {}),
    "FusedBatchNormV3": ({"x": X, **NORM}, {}),
    "FusedBatchNormGrad": ({"y_backprop": G, "x": X, "scale": VECTOR, **RESERVES}, {}),
    "FusedBatchNormGradV2": ({"y_backprop": G, "x": X, "scale": VECTOR, **RESERVES}, {}),
    "FusedBatchNormGradV3": (
        {"y_backprop": G, "x": X, "scale": VECTOR, **RESERVES, "reserve_space_3": np.float32(0)},
        {},
    ),
    "DepthwiseConv2dNative": ({"input": X, "filter": normal(3, 3, 4, 1)}, CONV),
    "DepthwiseConv2dNativeBackpropInput": (
        {"out_backprop": G, "filter": normal(3, 3, 4, 1)},
        {"input_sizes": X.shape, **CONV},
    ),
    "DepthwiseConv2dNativeBackpropFilter": (
        {"input": X, "out_backprop": G},
        {"filter_sizes": (3, 3, 4, 1), **CONV},
    ),
}


def function_of(name: str) -> tuple[Callable[..., tuple[Any, ...]], list[Any]]:
    """The operator as a function of its operands, and these."""
    operands, attributes = EXAMPLES[name]

    def function(*arrays: Any) -> tuple[Any, ...]:
        results = getattr(eq.raw_ops, name)(**dict(zip(operands, arrays, strict=True)), **attributes)
        return tuple(results) if isinstance(results, tuple) else (results,)

    return function, list(operands.values())


def same(got: Any, wanted: Any, what: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b), what=what)


def near(got: Any, wanted: Any, what: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max(initial=0) <= 2e-5 * (np.abs(b).max(initial=0) + 1e-6), f"{what}: {a} {b}"


def arriving(results: Any, name: str) -> Any:
    """Gradients that arrive at the results; 0 where the operator has none."""
    op = BY_RAW_NAME[name]
    return tuple(
        normal(*r.shape, seed=2) * np.float32(result in op.differentiable) if r.size else np.zeros(r.shape, np.float32)
        for r, result in zip(results, op.results, strict=True)
    )


def energy(results: Any, name: str) -> Any:
    """A number with first and second derivatives that are not 0: batch norm's sums and sums of squares are constant."""
    op = BY_RAW_NAME[name]
    labelled = zip(results, op.results, strict=False)
    return sum((r**2 * (1 + normal(*r.shape, seed=4))).sum() for r, label in labelled if label in op.differentiable)


def gradient(function: Any, name: str) -> Callable[..., Any]:
    def of(*operands: Any) -> Any:
        results, vjp = jax.vjp(function, *operands)
        return vjp(tuple(map(jnp.asarray, arriving(results, name))))

    return of


def calls(function: Any, *operands: Any) -> tuple[int, int]:
    """How many calls of kernels and how many loops there are in the program."""
    text = jax.jit(function).lower(*operands).as_text()
    return text.count("@exactqat("), text.count("stablehlo.while")


def jit(name: str) -> str:
    function, operands = function_of(name)
    same(jax.jit(function)(*operands), function(*operands), "jit")
    return "same bits"


def grad(name: str) -> str:
    """The same with and without jit, and what PyTorch's autograd says."""
    import torch

    function, operands = function_of(name)
    got = gradient(function, name)(*map(jnp.asarray, operands))
    second = "Grad" in name or "Backprop" in name
    # Second order gradients are partly the arrays' own arithmetic, which XLA fuses.
    (near if second else same)(jax.jit(gradient(function, name))(*operands), got, "jitted gradient")
    tensors = [torch.tensor(operand, requires_grad=True) for operand in operands]
    results = function(*tensors)
    pairs = [
        (result, torch.from_numpy(np.array(g)))
        for result, g in zip(results, arriving(results, name), strict=True)
        if result.requires_grad
    ]
    outputs, incoming = zip(*pairs, strict=True)
    theirs = torch.autograd.grad(outputs, tensors, incoming, allow_unused=True)
    for ours, their, operand in zip(got, theirs, operands, strict=True):
        wanted = np.zeros_like(operand) if their is None else their.numpy()
        # Both are made of the same calls, but what is written around them XLA may fuse.
        near(ours, wanted, "gradient beside PyTorch's")
    return "second order" if second else "gradient operator"


def jvp(name: str) -> str:
    """Forward and reverse mode are transposes of each other, and the derivative of forward mode exists."""
    function, operands = function_of(name)
    tangents = tuple(normal(*np.shape(operand), seed=3) if np.size(operand) else operand for operand in operands)
    results, pushed = jax.jit(lambda *o: jax.jvp(function, o, tangents))(*operands)
    same(results, function(*operands), "results")
    pulled = gradient(function, name)(*map(jnp.asarray, operands))
    forward = sum(float((g * np.asarray(t)).sum()) for g, t in zip(arriving(results, name), pushed, strict=True))
    reverse = sum(float((np.asarray(g) * t).sum()) for g, t in zip(pulled, tangents, strict=True))
    scale = sum(float(np.abs(np.asarray(g) * t).sum()) for g, t in zip(pulled, tangents, strict=True))
    assert abs(forward - reverse) <= 1e-4 * (scale + 1e-3), (forward, reverse)
    _, linear = jax.linearize(function, *operands)
    near(linear(*tangents), pushed, "linearize")

    def of_first(first: Any) -> Any:
        return energy(function(first, *operands[1:]), name)

    slope = jax.grad(of_first)
    over_reverse = jax.jvp(slope, (jnp.asarray(operands[0]),), (tangents[0],))[1]
    over_forward = jax.grad(lambda a: jax.jvp(of_first, (a,), (tangents[0],))[1])(jnp.asarray(operands[0]))
    near(over_forward, over_reverse, "reverse over forward and forward over reverse")
    return "yes"


def vmap(name: str) -> str:
    """Over the data; everything that has its shape is mapped with it."""
    function, operands = function_of(name)
    mapped = [np.shape(operand) == X.shape for operand in operands]
    stacked = [np.stack([o, o[::-1], -o]) if m else o for o, m in zip(operands, mapped, strict=True)]
    batched = jax.vmap(function, in_axes=[0 if m else None for m in mapped])
    got = jax.jit(batched)(*stacked)
    for member in range(3):
        wanted = function(*[o[member] if m else o for o, m in zip(stacked, mapped, strict=True)])
        same([result[member] for result in got], wanted, "vmap")
    count, loops = calls(batched, *stacked)
    return "one call" if (count, loops) == (1, 0) else "one call, sums in a loop" if count > 1 else "a loop"


def scan(name: str) -> str:
    """As the body of `scan`, `while_loop` and `cond`, and the gradient through `scan`."""
    function, operands = function_of(name)
    first, *rest = operands
    stacked = np.stack([first, -first])

    def body(total: Any, member: Any) -> Any:
        results = function(member, *rest)
        return total + energy(results[:1], name), results

    _, got = jax.lax.scan(body, jnp.float32(0), stacked)
    for member in range(2):
        same([result[member] for result in got], function(stacked[member], *rest), "scan")
    slopes = jax.grad(lambda a: jax.lax.scan(body, jnp.float32(0), a)[0])(jnp.asarray(stacked))
    for member in range(2):
        alone = jax.grad(lambda a: energy(function(a, *rest)[:1], name))(jnp.asarray(stacked[member]))
        near(slopes[member], alone, "gradient through scan")
    chosen = jax.lax.cond(True, lambda a: function(a, *rest)[0], lambda a: 0 * function(a, *rest)[0], first)
    same(chosen, function(*operands)[0], "cond")
    looped = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, function(first, *rest)[0]), (0, chosen * 0))
    same(looped[1], chosen, "while")
    return "same bits"


def remat(name: str) -> str:
    function, operands = function_of(name)
    kept = jax.jit(gradient(function, name))(*operands)
    same(jax.jit(gradient(jax.checkpoint(function), name))(*operands), kept, "remat")
    return "same bits"


def export(name: str) -> str:
    """To bytes and back, with a batch that is a symbol, forward and backward."""
    function, operands = function_of(name)
    attributes = EXAMPLES[name][1]
    if "input_sizes" in attributes:  # which would have to be a symbol, too

        def symbolic(*arrays: Any) -> Any:
            own = attributes | {"input_sizes": arrays[0].shape}
            return (getattr(eq.raw_ops, name)(**dict(zip(EXAMPLES[name][0], arrays, strict=True)), **own),)
    else:
        symbolic = function
    (size,) = jax.export.symbolic_shape("b")
    arguments = [
        jax.ShapeDtypeStruct((size, *X.shape[1:]) if np.shape(o) == X.shape else np.shape(o), np.float32)
        for o in operands
    ]

    def both(*arrays: Any) -> Any:
        return symbolic(*arrays), jax.grad(lambda first: (symbolic(first, *arrays[1:])[0] ** 3).sum())(arrays[0])

    allowed = [jax.export.DisabledSafetyCheck.custom_call("exactqat")]
    exported = jax.export.export(jax.jit(both), disabled_checks=allowed)(*arguments)
    restored = jax.export.deserialize(exported.serialize())
    for count in (1, 5, 8):
        some = [operand[:count] if np.shape(operand) == X.shape else operand for operand in operands]
        same(restored.call(*some), jax.jit(both)(*some), f"a batch of {count}")
    return "symbolic batch"


def donate(name: str) -> str:
    """With `out=` into the memory of a donated operand."""
    op, (operands, attributes) = BY_RAW_NAME[name], EXAMPLES[name]
    if not op.reuses:
        return NONE
    function, values = function_of(name)
    wanted = function(*values)

    for reused in op.reuses:

        def over(*arrays: Any, reused: str = reused) -> Any:
            named = dict(zip(operands, arrays, strict=True))
            out = (named[reused], *[None] * (len(op.results) - 1))
            return tuple(jax.tree.leaves(getattr(eq.raw_ops, name)(**named, **attributes, out=out)))

        position = list(operands).index(reused)
        compiled = jax.jit(over, donate_argnums=position).lower(*values).compile()
        assert not re.search(r"f32\[8,4,6,4\]\S* copy\(", compiled.as_text())
        arrays = [jnp.array(value) for value in values]
        address = arrays[position].unsafe_buffer_pointer()
        got = compiled(*arrays)
        assert got[0].unsafe_buffer_pointer() == address
        same(got, wanted, f"written over {reused}")
    return f"`out={op.reuses[0]}`"


def _mesh() -> Any:
    return jax.make_mesh((4, 2), ("b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def shard_map(name: str) -> str:
    """Each device its images: their results, and the sum of its gradients for what all have in common."""
    function, operands = function_of(name)
    if "input_sizes" in EXAMPLES[name][1]:
        own = EXAMPLES[name][1] | {"input_sizes": (2, *X.shape[1:])}

        def part(*arrays: Any) -> Any:
            return (getattr(eq.raw_ops, name)(**dict(zip(EXAMPLES[name][0], arrays, strict=True)), **own),)
    else:
        part = function
    cut = tuple(P("b") if np.shape(operand) == X.shape else P() for operand in operands)

    def local_energy(*arrays: Any) -> Any:
        return energy(part(*arrays), name)

    every = tuple(range(len(operands)))
    mapped = jax.jit(
        jax.shard_map(
            lambda *o: ([r[None] for r in part(*o)], jax.grad(local_energy, every)(*o)),
            mesh=jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=cut,
            out_specs=(P("b"), cut),
        )
    )
    # Not slices of arrays that are spread: XLA adds zeros to make them, which takes a zero's sign.
    results, gradients = jax.tree.map(np.asarray, mapped(*operands))
    wanted: list[Any] = [0] * len(operands)
    pieces: list[Any] = [[] for _ in operands]
    for device in range(4):
        images = slice(2 * device, 2 * device + 2)
        own_operands = [o[images] if np.shape(o) == X.shape else o for o in operands]
        same([result[device] for result in results], jax.jit(part)(*own_operands), f"device {device}")
        for i, value in enumerate(jax.jit(jax.grad(local_energy, every))(*own_operands)):
            pieces[i].append(np.asarray(value))
            wanted[i] = wanted[i] + np.asarray(value)
    for i, specification in enumerate(cut):
        near(gradients[i], np.concatenate(pieces[i]) if specification == P("b") else wanted[i], "gradient")
    return "per device, sums added"


def sharded(name: str, specification: Any) -> str:
    """Arrays with a `NamedSharding`: whether the devices' parts are gathered before the call."""
    function, operands = function_of(name)
    devices = _mesh()
    spread = [
        jax.device_put(o, NamedSharding(devices, specification)) if np.shape(o) == X.shape else o for o in operands
    ]

    def both(*arrays: Any) -> Any:
        return function(*arrays), gradient(function, name)(*arrays)

    executables = [jax.jit(way).lower(*spread).compile() for way in (function, both)]
    got, wanted = executables[0](*spread), jax.jit(function)(*operands)
    near(got, wanted, "forward")
    if BY_RAW_NAME[name].parts_rule is None:  # else made of the devices' sums
        elementwise = [i for i, result in enumerate(got) if result.shape == X.shape]
        same([got[i] for i in elementwise], [wanted[i] for i in elementwise], "forward")
    near(executables[1](*spread), jax.jit(both)(*operands), "gradient")
    return "gathered" if any("all-gather" in e.as_text() for e in executables) else "no gathering"


def over_batch(name: str) -> str:
    return sharded(name, P("b"))


def over_channels(name: str) -> str:
    return sharded(name, P(None, None, None, "c"))


ALONE: dict[str, Callable[[str], str]] = {
    "`jit`": jit,
    "`grad`": grad,
    "`jvp`, `linearize`": jvp,
    "`vmap`": vmap,
    "`scan`, `while`, `cond`": scan,
    "`remat`": remat,
    "`export`": export,
    "donated": donate,
}
SPREAD: dict[str, Callable[[str], str]] = {
    "`shard_map`": shard_map,
    "`NamedSharding`, batch": over_batch,
    "channels": over_channels,
}
COLUMNS = (*ALONE, *SPREAD)


def measured(column: str, name: str) -> str:
    return (ALONE | SPREAD)[column](name)


@cache
def spread_cells(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """{column: {operator: cell, or an error that begins with "error"}} from a process with several devices."""
    command = [sys.executable, __file__, "--spread", *names]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def table() -> str:
    spread = spread_cells(tuple(EXAMPLES))
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in EXAMPLES:
        cells = [ALONE[c](name) if c in ALONE else spread[c][name] for c in COLUMNS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def written_cells() -> dict[tuple[str, str], str]:
    """{(column, operator): cell} of the page."""
    text = PAGE.read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("|")
    ]
    columns = rows[0][1:]
    return {
        (column, row[0].strip("` ")): cell for row in rows[2:] for column, cell in zip(columns, row[1:], strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/jax.md")
    parser.add_argument("--spread", nargs="*", help="print these operators' cells that need several devices")
    chosen = parser.parse_args()
    if chosen.spread is not None:
        cells: dict[str, dict[str, str]] = {}
        for column, cell in SPREAD.items():
            cells[column] = {}
            for name in chosen.spread:
                try:
                    cells[column][name] = cell(name)
                except Exception as error:
                    cells[column][name] = f"error: {type(error).__name__}: {error}"
        print(json.dumps(cells))
        return
    markdown = table()
    if chosen.write:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN)] + f"{BEGIN}\n{markdown}\n" + text[text.index(END) :])
    else:
        print(markdown)


if __name__ == "__main__":
    main()
