# SPDX-License-Identifier: Apache-2.0
"""Others' quantized .onnx files beside the simulated onnxruntime: networks, codes and differing, by operator.

python tests/campaigns/run_onnxruntime.py                      all networks of tests/plain_networks.py, each by
                                                               `quantize_static` in QDQ and in QOperator format
python tests/campaigns/run_onnxruntime.py --networks ds_cnn m5
python tests/campaigns/run_onnxruntime.py --small              tests/small_onnx.py with each of the tool's options
python tests/campaigns/run_onnxruntime.py FOLDER ...           the .onnx files there, NNCF's for example
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import _tests_folder  # noqa: F401
import onnx_files
import plain_networks
import small_onnx

from exactqat import deploy, qat
from exactqat.deploy import Refusal

FORMS = ("QDQ", "QOperator")


def made(names: list[str], folder: Path) -> Iterator[tuple[str, Path | str]]:
    """Files, or why onnxruntime's tools make none."""
    for name in names:
        for form in FORMS:
            into = folder / f"{name}-{form}"
            into.mkdir()
            try:
                yield f"{name}, {form}", onnx_files.quantized(name, into, form, per_channel=True)
            except Exception as error:  # noqa: BLE001 - of any kind, and not this library's
                yield f"{name}, {form}", " ".join(f"{type(error).__name__}: {error}".split())[:160]


def made_small(folder: Path) -> Iterator[tuple[str, Path | str]]:
    """Likewise of small networks, with each of the tools' options."""
    for name, options in small_onnx.FILES:
        try:
            yield f"{name}, {options}", small_onnx.quantized(name, options, folder)
        except ValueError as error:
            yield f"{name}, {options}", " ".join(str(error).split())[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(plain_networks.NETWORKS))
    parser.add_argument("--small", action="store_true", help="networks of tests/small_onnx.py, with all options")
    parser.add_argument("--examples", type=int, default=4)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    files: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(path.name, path) for directory in arguments.folders for path in sorted(directory.glob("*.onnx"))]
        files_made = made_small(Path(folder)) if arguments.small else made(arguments.networks, Path(folder))
        for name, path in pairs or files_made:
            if isinstance(path, str):
                files["not made"] += 1
                print(f"{name}: not made: {path}", flush=True)
                continue
            try:
                (device,) = deploy.inspect(path, examples=arguments.examples).devices
            except (Refusal, qat.UnsupportedOperator) as error:
                files["refused"] += 1
                lines = str(error).splitlines()[1:] or [str(error)]
                reasons.update({re.sub(r"'[^']*'|\d+[.\d]*|(?<=not quantize ).*", "…", line) for line in lines})
                print(f"{name}: refused: {' '.join(str(error).split())[:200]}", flush=True)
                continue
            if device.not_run:
                files["not run"] += 1
                print(f"{name}: not run: {device.not_run}", flush=True)
                continue
            files["read"] += 1
            for row in device.operators:
                of_kind = counts.setdefault(row.kind, Counter())
                of_kind["files"] += 1
                of_kind["codes"] += row.values
                of_kind["differing"] += row.differing
                of_kind["claimed"] += row.values if row.exact else 0
                of_kind["differing as claimed"] += row.differing if row.exact else 0
            print(f"{name}: {device.differing:,} of {device.values:,} differ", flush=True)
    print(", ".join(f"{count} {word}" for word, count in files.items()))
    for line, count in reasons.most_common(12):
        print(f"  {count} {line.strip()[:140]}")
    for kind, row in sorted(counts.items()):
        words = [f"{row[word]:,}" for word in ("codes", "differing", "claimed", "differing as claimed")]
        print(f"| {' | '.join([kind, *words])} |")
    return int(any(row["differing as claimed"] for row in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
