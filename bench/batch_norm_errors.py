# SPDX-License-Identifier: Apache-2.0
"""What batch norm errs by, beside other ways to compute it: the table of docs/decisions/batch-norm.md.

    python bench/batch_norm_errors.py --tensorflow PYTHON      a Python that has TensorFlow

Errors against the formulas in extended precision, in units in the last place of the largest exact value of a channel:
the largest one and, in brackets, the mean. The float32 candidates are computed here, in NumPy; PyTorch and TensorFlow
(its own kernels, without oneDNN) compute the same calls.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exactqat as eq
from exactqat.operators.reference.arithmetic import fused_multiply_add

EPSILON = np.float32(1e-3)
Arrays = dict[str, np.ndarray]


def data(random: np.random.Generator) -> dict[str, Arrays]:
    """[rows, channels], gradients, scale and offset of each kind."""

    def call(x: np.ndarray) -> Arrays:
        rows, channels = x.shape
        vectors = random.uniform(0.5, 2, (2, channels)).astype(np.float32)
        gradients = random.standard_normal((rows, channels)).astype(np.float32)
        return {"x": x.astype(np.float32), "gradients": gradients, "scale": vectors[0], "offset": vectors[1]}

    normal = random.standard_normal
    outlier = normal((1568, 64))
    outlier[0] = 1e4
    return {
        "normal, 25088 rows": call(normal((25088, 32))),
        "normal, 1568 rows": call(normal((1568, 64))),
        "normal, 49 rows": call(normal((49, 512))),
        "normal, 8 rows": call(normal((8, 512))),
        "normal, 2 rows": call(normal((2, 512))),
        "mean 1000, deviation 0.1": call(1000 + normal((1568, 64)) / 10),
        "first of 1568 is 10000": call(outlier),
        "constant channels": call(np.repeat(normal((1, 64)), 1568, 0)),
        "after ReLU6": call(np.clip(normal((1568, 64)) * 3, 0, 6)),
    }


def exactly(call: Arrays) -> Arrays:
    x, gradients, scale, offset, mean, variance = (
        call[k].astype(np.longdouble) for k in ("x", "gradients", "scale", "offset", "mean", "variance")
    )
    own_mean, own_variance = x.mean(0), x.var(0)
    y = (x - own_mean) / np.sqrt(own_variance + EPSILON) * scale + offset
    inverse = 1 / np.sqrt(variance + EPSILON)
    products = (gradients * (x - mean)).sum(0)
    shifted = gradients - gradients.mean(0) - (x - mean) * inverse * inverse * products / len(x)
    return {"y": y, "x_backprop": scale * inverse * shifted, "scale_backprop": products * inverse}


def ours(call: Arrays) -> Arrays:
    x, gradients = (call[k][None, :, None, :] for k in ("x", "gradients"))
    scale, offset, mean, variance = (call[k] for k in ("scale", "offset", "mean", "variance"))
    y = eq.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=scale[:0], variance=scale[:0], epsilon=float(EPSILON)
    ).y
    gradient = eq.raw_ops.FusedBatchNormGradV3(
        y_backprop=gradients, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
        reserve_space_3=variance, epsilon=float(EPSILON),
    )  # fmt: skip
    return {"y": y[0, :, 0], "x_backprop": gradient.x_backprop[0, :, 0], "scale_backprop": gradient.scale_backprop}


def runs(values: np.ndarray) -> np.ndarray:
    """Sums down the rows: 16 lanes of 4 float32 values each in 64 rows, folded once in float32, then in float64."""
    padded = np.concatenate([values, np.zeros((-len(values) % 64, values.shape[1]), np.float32)])
    lanes = padded.reshape(-1, 4, 16, values.shape[1])
    sums = lanes[:, 0]
    for step in range(1, 4):
        sums = sums + lanes[:, step]
    return (sums[:, :8] + sums[:, 8:]).astype(np.float64).sum((0, 1))


def split(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = exact.astype(np.float32)
    return high, (exact - high).astype(np.float32)


def otherwise(call: Arrays, short_runs: bool, halves: bool) -> Arrays:
    """Each element in float64, rounded once; or in float32 with coefficients given as two float32 numbers and fused
    multiply-adds throughout. Sums of the gradient in float64, or in short runs of float32."""
    x, gradients = call["x"], call["gradients"]
    scale, offset, mean, variance = (call[k].astype(np.float64) for k in ("scale", "offset", "mean", "variance"))
    exact = x.astype(np.float64)
    own_mean = exact.mean(0)
    slope = scale / np.sqrt(exact.var(0) + EPSILON)
    inverse = 1 / np.sqrt(variance + EPSILON)
    if short_runs:
        sums, products = runs(gradients), runs(gradients * (x - call["mean"]))
    else:
        sums, products = gradients.sum(0, dtype=np.float64), (gradients * (exact - mean)).sum(0)
    factor, gradient_mean = scale * inverse, sums / len(x)
    of_x = -factor * inverse * inverse * products / len(x)
    if halves:
        (a, a_low), (c, c_low) = split(slope), split(offset - own_mean * slope)
        y = fused_multiply_add(x, a, c) + fused_multiply_add(x, a_low, c_low)
        (a, a_low), (b, b_low), (c, c_low) = split(factor), split(of_x), split(-factor * gradient_mean - of_x * mean)
        rest = fused_multiply_add(a_low, gradients, fused_multiply_add(b_low, x, c_low))
        x_backprop = fused_multiply_add(a, gradients, fused_multiply_add(b, x, c) + rest)
    else:
        y = ((exact - own_mean) * slope + offset).astype(np.float32)
        x_backprop = (factor * (gradients - gradient_mean) + of_x * (exact - mean)).astype(np.float32)
    return {"y": y, "x_backprop": x_backprop, "scale_backprop": (products * inverse).astype(np.float32)}


def of_pytorch(call: Arrays) -> Arrays:
    x, gradients = (torch.tensor(call[k])[..., None, None] for k in ("x", "gradients"))
    scale, offset, mean = (torch.tensor(call[k]) for k in ("scale", "offset", "mean"))
    y = torch.nn.functional.batch_norm(x, None, None, scale, offset, True, eps=float(EPSILON))
    inverse = torch.tensor((1 / np.sqrt(call["variance"].astype(np.float64) + EPSILON)).astype(np.float32))
    gradient = torch.ops.aten.native_batch_norm_backward(
        gradients, x, scale, None, None, mean, inverse, True, float(EPSILON), [True] * 3
    )
    return {
        "y": y[..., 0, 0].numpy(), "x_backprop": gradient[0][..., 0, 0].numpy(), "scale_backprop": gradient[1].numpy()
    }  # fmt: skip


TENSORFLOW = """
import sys, numpy as np, tensorflow as tf
calls, results = np.load(sys.argv[1]), {}
for kind in sorted({name.split("/")[0] for name in calls}):
    x, gradients, scale, offset, mean, variance = (
        calls[f"{kind}/{k}"] for k in ("x", "gradients", "scale", "offset", "mean", "variance"))
    x, gradients = x[None, :, None], gradients[None, :, None]
    y = tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=offset, mean=[], variance=[], epsilon=1e-3).y
    inverse = tf.raw_ops.FusedBatchNormGradV3(y_backprop=gradients, x=x, scale=scale, reserve_space_1=mean,
        reserve_space_2=variance, reserve_space_3=variance, epsilon=1e-3)
    results |= {f"{kind}/y": y.numpy()[0, :, 0], f"{kind}/x_backprop": inverse.x_backprop.numpy()[0, :, 0],
                f"{kind}/scale_backprop": inverse.scale_backprop.numpy()}
np.savez(sys.argv[2], **results)
"""


def of_tensorflow(python: str, calls: dict[str, Arrays]) -> dict[str, Arrays]:
    with tempfile.TemporaryDirectory() as folder:
        to, back = Path(folder) / "calls.npz", Path(folder) / "results.npz"
        np.savez(to, **{f"{kind}/{name}": a for kind, call in calls.items() for name, a in call.items()})  # type: ignore[arg-type]
        settings = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run([python, "-c", TENSORFLOW, str(to), str(back)], check=True, env=settings)
        results: dict[str, Arrays] = {kind: {} for kind in calls}
        with np.load(back) as file:
            for name in file:
                kind, output = name.split("/")
                results[kind][output] = file[name]
        return results


def errors(result: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """The largest error and the mean one, in units in the last place of a channel's largest value."""
    largest = np.abs(exact).max(0).astype(np.float64)
    # Where all exact values are as good as zero a unit is what float32 makes of the largest term, which is about 1.
    unit = np.spacing(np.maximum(largest, 1e-3).astype(np.float32)).astype(np.float64)
    distance = (np.abs(result.astype(np.longdouble) - exact) / unit).astype(np.float64)
    return float(distance.max()), float(distance.mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", metavar="PYTHON", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    calls = data(np.random.default_rng(options.seed))
    for call in calls.values():
        exact = call["x"].astype(np.float64)
        call |= {"mean": exact.mean(0).astype(np.float32), "variance": exact.var(0).astype(np.float32)}
    theirs = of_tensorflow(options.tensorflow, calls)
    names = ("exactqat", "TensorFlow", "PyTorch", "float64 throughout", "two numbers a coefficient", "and short runs")
    for output in ("y", "x_backprop", "scale_backprop"):
        print(f"\n| {output} | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
        for kind, call in calls.items():
            exact = exactly(call)[output]
            results: list[Any] = [
                ours(call), theirs[kind], of_pytorch(call),
                otherwise(call, False, False), otherwise(call, False, True), otherwise(call, True, True),
            ]  # fmt: skip
            cells = ["{:.2f} ({:.2f})".format(*errors(result[output], exact)) for result in results]
            print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
