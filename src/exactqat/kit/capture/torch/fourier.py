# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms, as products with the cosines and sines of each axis. Complex tensors are pairs of real ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from ..core.refusals import Refused
from .contents import Content, Meta
from .expression import Node
from .reader import Reader, handles, require_numbers
from .schema import base_name

aten = torch.ops.aten

# Names of transforms of one axis, of the last two, of any.
_AXES = {"": (-1,), "2": (-2, -1), "n": None}
_TRANSFORMS = [f"fft_{kind}fft{axes}" for kind in ("", "i", "r") for axes in _AXES]


def _along(c: Reader, x: Content, axis: int, matrix: torch.Tensor) -> Content:
    """A product of fixed numbers [results, size] with an axis, which stays where it is."""
    rows = Content(Meta(tuple(matrix.shape), torch.float32), node=Node("data", (matrix.float(),)))
    made = c.call(aten.linear.default, c.call(aten.movedim.int, x, axis, -1), rows)
    moved: Content = c.call(aten.movedim.int, made, -1, axis)
    return moved


def _parts(c: Reader, x: Content) -> tuple[Content, Content | None]:
    """Real and imaginary part; None: 0."""
    if not x.meta.dtype.is_complex:
        require_numbers(c, x)
        return x, None
    if x.name not in c.complexes:
        raise Refused("of complex numbers that no Fourier transform made; compute with real numbers")
    return c.complexes[x.name]


@handles(*_TRANSFORMS)
def _transform(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied).removeprefix("fft_")
    x, rank = a.self, len(a.self.shape)
    given = a.dim if isinstance(a.dim, (list, tuple)) else range(rank) if a.dim is None else [a.dim]
    axes = [axis % rank for axis in given]
    c.keep_batch(x, axes)
    size, argument = (a.n, "n") if hasattr(a, "n") else (a.s, "s")
    if size is not None and [size] != [x.shape[axis] for axis in axes] and size != [x.shape[axis] for axis in axes]:
        raise Refused.argument(argument, size, "None and the sizes of the axes are allowed")
    real, imaginary = _parts(c, x)
    back = name.startswith("i")
    whole = math.prod(x.shape[axis] for axis in axes)
    norm = a.norm or "backward"
    scale = 1 / math.sqrt(whole) if norm == "ortho" else 1 / whole if (norm == "backward") == back else 1.0
    for axis in reversed(axes):
        count = x.shape[axis]
        # rfft leaves out what is the mirror of the rest.
        results = count // 2 + 1 if name.startswith("r") and axis == axes[-1] else count
        angles = torch.outer(torch.arange(results), torch.arange(count)).remainder(count).double() * (
            2 * math.pi / count
        )
        cosines, sines = angles.cos() * scale, angles.sin() * (scale if back else -scale)
        scale = 1.0
        of_real = [_along(c, real, axis, each) for each in (cosines, sines)]
        if imaginary is None:
            real, imaginary = of_real
            continue
        of_imaginary = [_along(c, imaginary, axis, each) for each in (cosines, sines)]
        real = c.call(aten.sub.Tensor, of_real[0], of_imaginary[1])
        imaginary = c.call(aten.add.Tensor, of_real[1], of_imaginary[0])
    assert imaginary is not None
    # Vanishes where its parts alone are read.
    made: Content = c.unsupported(c.applied, vars(a), meta, "its complex numbers are read; .real and .imag are allowed")
    c.complexes[made.name] = real, imaginary
    return made


@handles("real", "imag", "view_as_real")
def _part(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    real, imaginary = _parts(c, a.self)
    kind = base_name(c.applied)
    if imaginary is None:
        return real
    if kind == "view_as_real":
        return c.call(aten.stack.default, [real, imaginary], -1)
    return real if kind == "real" else imaginary
