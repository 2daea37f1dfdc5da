# SPDX-License-Identifier: Apache-2.0
"""Random graphs of every operator, trained: frozen integers are the graph's, and a step in real numbers works.

    python tests/campaigns/fuzz_from_file.py --count 100 --seed 0

A graph is refused in words, or the PyTorch module that `qat.prepare` makes of it computes its integers once it is
frozen, for every device; before that, all gradients of a step are finite.
"""

from __future__ import annotations

import argparse
import collections
import warnings

import _tests_folder  # noqa: F401
import numpy as np
import torch
from device_cases import NAMES, random_codes, random_graph

from exactqat import deploy, qat
from exactqat.deploy import Graph
from exactqat.kit.device import PROFILES
from exactqat.qat import UnsupportedOperator


def outcome(graph: Graph, rng: np.random.Generator) -> str:
    """ "equal", or why not."""
    try:
        model = qat.prepare(graph, device=str(rng.choice(list(PROFILES))))
    except UnsupportedOperator as refusal:
        return f"refused: {str(refusal).splitlines()[-1].partition(': ')[2][:90]}"
    codes = random_codes(rng, graph)
    reals = []
    for name, feed in zip(graph.inputs, model.plan.inputs, strict=True):
        scale, zero_point = model.plan.grids[feed.grid].fixed
        whole = codes[name] if codes[name].dtype.kind == "i" else np.rint(codes[name] / np.float32(scale)) + zero_point
        reals.append(torch.from_numpy((whole.astype(np.float32) - zero_point) * np.float32(scale)).requires_grad_())
    quantized = {
        name: codes[name] if codes[name].dtype.kind == "i" else real.detach().numpy()
        for name, real in zip(graph.inputs, reals, strict=True)
    }
    results = model(*reals)
    results = list(results.values()) if isinstance(results, dict) else [results]
    sum(result.square().sum() for result in results).backward()
    trained = [*model.parameters(), *reals]
    bad = [tensor for tensor in trained if tensor.grad is not None and not tensor.grad.isfinite().all()]
    if bad:
        return "gradients that are not finite"
    model.eval()
    qat.freeze(model)
    lowered = deploy.lower(model)
    feed = {}
    for name, real in zip(lowered.inputs, reals, strict=True):
        feed[name] = deploy.quantize(real.detach().numpy(), lowered.tensors[name].quantization)
    for device in PROFILES:
        expected = deploy.simulate(graph, quantized, device=device)
        integers = deploy.simulate(lowered, feed, device=device)
        for theirs, ours in zip(graph.signature.outputs, lowered.signature.outputs, strict=True):
            result = integers[ours.tensor]
            if expected[theirs.tensor].dtype == np.float32:
                result = deploy.dequantize(result, lowered.tensors[ours.tensor].quantization)
            if not np.array_equal(expected[theirs.tensor], result):
                return f"differs on {device}"
    return "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(NAMES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    wrong = 0
    for kind in options.kinds:
        rng = np.random.default_rng([*kind.encode(), options.seed])
        counts: collections.Counter[str] = collections.Counter()
        for _ in range(options.count):
            graph = random_graph(rng, kind)
            try:
                counts[outcome(graph, rng)] += 1
            except Exception as error:
                counts[f"died: {type(error).__name__}: {str(error)[:200]}"] += 1
        wrong += sum(count for word, count in counts.items() if not word.startswith(("equal", "refused")))
        print(f"{kind:32}", dict(counts), flush=True)
    print(f"{wrong} differ or died")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
