# SPDX-License-Identifier: Apache-2.0
"""Accuracy of real networks on real data after quantization, beside other people's.

    python bench/real.py --data FOLDER --peers PYTHON [--networks resnet8,dscnn] [--precisions w4a8] [--seeds 3]
    python bench/real.py --page

FOLDER is laid out as docs/real-data.md says. Options, rows and peers are those of bench/accuracy.py; each precision has
two rows, without training (PTQ) and with it (QAT), where there are examples to train on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

WAYS = ("PTQ", "QAT")
BITS = ("w8a8", "w8a16", "w4a8", "w4a4", "w3a3", "mixed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("."), help="the folder of data and weights")
    data = parser.parse_known_args()[0].data.resolve()
    # Before networks are imported: adapters, which are other processes, find the data by it too.
    os.environ["REAL_DATA"] = str(data)
    sys.path.insert(0, str(Path(__file__).parent))
    from accuracy import Comparison, add_options, start
    from real_networks import REAL_TASKS

    comparison = Comparison(tuple(REAL_TASKS), BITS, WAYS, "real.jsonl", "bench/real.py --page")
    add_options(parser, comparison)
    start(parser, parser.parse_args(), comparison)


if __name__ == "__main__":
    main()
