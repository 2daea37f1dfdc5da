# SPDX-License-Identifier: Apache-2.0
"""Functions over axes that a model writes out, known by their steps: means, pools, softmax, PReLU.

Each takes the operands of a step that may complete such a function, and gives what it makes, or None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.builder import Fixed, ItemBuilder, Moving


def mean_or_pool(c: ItemBuilder[Fixed], name: str, first: object, second: object) -> Moving | None:
    """A sum divided by its count. name: "div", or "mul" with one over the count."""
    x, other = (first, second) if isinstance(first, Moving) else (second, first)
    counts = None if isinstance(other, Moving) else c.numbers(other)
    if not isinstance(x, Moving) or counts is None or not counts.size or (name == "div" and x is not first):
        return None
    number = float(counts.flat[0]) if (counts == counts.flat[0]).all() else None
    total = c.made_from(x, "sum")
    if total is not None and number:
        step, source = total
        count = float(np.prod([source.shape[axis] for axis in step.attributes["axes"]]))
        divided = number if name == "div" else 1.0 / number
        if abs(divided - count) < 1e-5 * count:
            return c.emit("mean", [source], x.shape, **step.attributes)
    pooled = c.made_from(x, "avg_pool")
    if pooled is None or pooled[0].attributes["divisor"] != 1 or name != "div":
        return None
    step, source = pooled
    attributes = dict(step.attributes)
    whole = float(np.prod(attributes["window"]))
    if number is not None:
        same_count = abs(number - whole) < 1e-5 * whole
        return c.emit("avg_pool", [source], x.shape, **{**attributes, "divisor": None if same_count else number})
    expected = _counts_without_padding(c, x, source, attributes)
    if not np.allclose(np.broadcast_to(expected, np.broadcast_shapes(expected.shape, counts.shape)), counts):
        return None
    return c.emit("avg_pool", [source], x.shape, **{**attributes, "divisor": None, "count_include_pad": False})


def _counts_without_padding(c: ItemBuilder[Fixed], x: Moving, source: Moving, pool: dict[str, Any]) -> np.ndarray:
    """How many values of its operand each window of a pool has."""
    sides = [pool["padding"], pool["window"], pool["strides"]]
    spatial = [at for at in range(x.rank) if at not in (pool["channel_axis"], c.batch_axis(x.shape))]
    counts = np.ones([1] * x.rank)
    for axis, (before, after), side, stride in zip(spatial, *sides, strict=True):
        inside = np.zeros(before + source.shape[axis] + after)
        inside[before : before + source.shape[axis]] = 1
        line = [inside[at * stride : at * stride + side].sum() for at in range(x.shape[axis])]
        counts = counts * np.reshape(line, [-1 if at == axis else 1 for at in range(x.rank)])
    return counts


def _shifted(c: ItemBuilder[Fixed], x: object) -> tuple[Moving, Moving] | None:
    """(y, x) of ``y = exp(x - max(x))``, or of ``exp(x)``, from that y."""
    exponential = c.made_from(x, "exp")
    if exponential is None or not isinstance(x, Moving):
        return None
    shifted = c.made_from(exponential[1], "sub")
    if shifted is not None and isinstance(shifted[0].inputs[1], str) and shifted[0].inputs[1] in c.items:
        # Softmax is the same whatever is subtracted, so are its gradients.
        largest = c.made_from(c.items[shifted[0].inputs[1]], "amax", stopped=True)
        if largest is not None and largest[1] is shifted[1]:
            return x, shifted[1]
    return x, exponential[1]


def _share_axis(c: ItemBuilder[Fixed], total: object, of: Moving) -> int | None:
    """The axis over which a sum of `of` goes that keeps it."""
    reduction = c.made_from(total, "sum")
    if reduction is None or reduction[1] is not of:
        return None
    axes = reduction[0].attributes["axes"]
    return int(axes[0]) if len(axes) == 1 and reduction[0].attributes["keep_dims"] else None


def softmax(c: ItemBuilder[Fixed], first: object, second: object) -> Moving | None:
    """exp(x - max) / sum(exp(x - max)), of both operands of the quotient."""
    exponential = _shifted(c, first)
    axis = None if exponential is None else _share_axis(c, second, exponential[0])
    if exponential is None or axis is None:
        return None
    return c.emit("softmax", [exponential[1]], exponential[1].shape, axis=axis)


def log_softmax(c: ItemBuilder[Fixed], first: object, second: object) -> Moving | None:
    """(x - max) - log(sum(exp(x - max)))"""
    logarithm = c.made_from(second, "log")
    if logarithm is None or not isinstance(first, Moving):
        return None
    total = c.made_from(logarithm[1], "sum")
    exponential = None if total is None else _shifted(c, total[1])
    if total is None or exponential is None:
        return None
    axis = _share_axis(c, logarithm[1], exponential[0])
    if axis is None:
        return None
    x = exponential[1]
    difference = c.made_from(first, "sub")
    if first is x or (difference is not None and difference[1] is x):
        return c.emit("log_softmax", [x], x.shape, axis=axis)
    return None


def normalized(c: ItemBuilder[Fixed], x: object, length: object, label: str = "") -> Moving | None:
    """x / max(norm(x), epsilon) along one axis, of both operands of the quotient."""
    repeated = c.made_from(length, "expand")
    clamped = c.made_from(length if repeated is None else repeated[1], "clamp")
    norm = None if clamped is None else c.made_from(clamped[1], "norm")
    if clamped is None or norm is None or norm[1].name != getattr(x, "name", None):
        return None
    how, bounds = norm[0].attributes, clamped[0].attributes
    one_axis = how["order"] == 2 and how["keep_dims"] and len(how["axes"]) == 1
    if not one_axis or bounds["min"] is None or bounds["max"] is not None:
        return None
    return c.emit("normalize", [norm[1]], norm[1].shape, label=label, axis=how["axes"][0], epsilon=bounds["min"])


def parametric_relu(c: ItemBuilder[Fixed], condition: Moving, off: object, on: object) -> Moving | None:
    """where(x >= 0, x, slope * x) with a slope that is trained."""
    word, *sides = condition.comparison or ("",)
    step = c.step_of(off)
    if word not in ("gt", "ge") or step is None:
        return None
    left, right = sides
    zero = c.numbers(right)
    if zero is None or zero.any():
        return None
    if not isinstance(on, Moving) or not isinstance(left, Moving) or not isinstance(off, Moving):
        return None
    if left.name != on.name or off.shape != on.shape:
        return None
    slopes = [name for name in step.inputs if name != on.name]
    if step.kind != "mul" or on.name not in step.inputs or len(slopes) != 1 or slopes[0] not in c.constants:
        return None
    slope = c.constants[str(slopes[0])]
    sizes = (1,) * (on.rank - len(slope.shape)) + slope.shape
    wide = [axis for axis, size in enumerate(sizes) if size != 1]
    if len(wide) > 1:
        return None
    count = int(np.prod(slope.shape)) if slope.shape else 1
    weight = c.then(c.fixed_named(str(slopes[0])), (count,), lambda array: array.reshape(count))
    return c.emit("prelu", [on, weight], on.shape, channel_axis=wide[0] if wide else on.rank - 1)
