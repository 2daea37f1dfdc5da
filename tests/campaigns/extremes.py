# SPDX-License-Identifier: Apache-2.0
"""Whatever training makes of a network's numbers, it goes to the device: parameters and ranges of all sizes.

    python tests/campaigns/extremes.py [--networks NAME ...] [--seeds 1] [--how before after learned wide]

Half of the parameters (or of the learned ranges) are multiplied by random powers of ten before calibration, or after
`freeze`, when ranges no longer follow. The network then has to be frozen, lowered and run under every profile that this
machine has, with every integer of training equal to the device's. `test_fitting.py` takes some of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np
import plain_networks
import torch
from agreement import assert_exact

from exactqat import qat

WAYS = ("before", "after", "learned", "wide")
RULES = {"learned": qat.Rule(ranges="learned"), "wide": qat.Rule(activation_bits=16)}


@torch.no_grad()
def scaled(tensors: Any, rng: np.random.Generator, low: float, high: float) -> None:
    """Half of the tensors times powers of ten."""
    for tensor in tensors:
        if rng.random() < 0.5:
            tensor.mul_(float(10 ** rng.uniform(low, high)))


def driven(name: str, how: str, seed: int) -> tuple[qat.PreparedModel, Any] | None:
    """A frozen network and its batch; None if that network cannot be prepared in this way."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model, batch = plain_networks.NETWORKS[name]()
    try:
        prepared = qat.prepare(model, batch, [RULES.get(how, qat.Rule())])
    except qat.UnsupportedOperator:
        return None
    if how in ("before", "wide"):
        scaled(prepared.parameters(), rng, -7, 3)
    qat.calibrate(prepared, [batch])
    if how == "learned":
        of_weights = {id(end) for end in prepared.weight_range_parameters()}
        ranges = [end for end in prepared.range_parameters() if id(end) not in of_weights]
        scaled(ranges, rng, -3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qat.RangesMovedWarning)
        qat.freeze(prepared)
    if how == "after":
        scaled(prepared.parameters(), rng, -7, 3)
    return prepared.eval(), batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(plain_networks.NETWORKS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--how", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    through = failed = left_out = 0
    for name in options.networks:
        for how in options.how:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                case = driven(name, how, seed)
                if case is None:
                    left_out += 1
                    continue
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        assert_exact(*case, Path(folder))
                    through += 1
                except Exception as error:  # the campaign goes on
                    failed += 1
                    where = traceback.extract_tb(error.__traceback__)[-1].name
                    print(f"{name} {how} {seed}: {type(error).__name__} in {where}: {str(error)[:300]}", flush=True)
    print(f"{through} networks through, {failed} failed, {left_out} cannot be prepared so")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
