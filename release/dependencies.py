# SPDX-License-Identifier: Apache-2.0
"""Which licenses dependencies may have, and which each one has by its own metadata.

Nothing of a dependency is in the wheel but nanobind; whoever installs it gets the others from their authors. They must
let Apache-2.0 code be used beside them without conditions on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

COMPATIBLE = {
    "0BSD", "AFL-2.1", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND", "ISC", "MIT",
    "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
}  # fmt: skip
EXCEPTIONS = {"LLVM-exception"}  # what may follow WITH: they only permit more

# What older metadata writes instead, in classifiers and in the field for the license.
WRITTEN = {
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}

# Whose metadata names none, and where it was read.
READ_ELSEWHERE = {
    "namex": ("Apache-2.0", "the LICENSE in its wheel"),
    "tflite-micro": ("Apache-2.0", "the heads of its files"),
}

# Not compatible, and allowed: a reason for each.
ALLOWED = {
    "nvidia-": "PyTorch's own choice where it installs with CUDA; CUDA's libraries come from NVIDIA under its terms",
}


def normal(name: str) -> str:
    """A package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def license_of(metadata: Mapping[str, Any]) -> str:
    """The SPDX expression of a package; empty if it names none that is known.

    Args:
        metadata: as in `pip install --report`: name, license_expression, license, classifier.
    """
    if metadata.get("license_expression"):
        return metadata["license_expression"]
    classifiers: Sequence[str] = metadata.get("classifier", ())
    named = [entry.split(" :: ")[-1] for entry in classifiers if entry.startswith("License :: ")]
    identifiers = sorted({WRITTEN[entry] for entry in named if entry in WRITTEN})
    if identifiers:
        return " AND ".join(identifiers)
    field = (metadata.get("license") or "").strip()
    if field in WRITTEN:
        return WRITTEN[field]
    # The whole text, or an expression from before there was a field for one.
    if field and "\n" not in field and parts_known(field):
        return field
    return READ_ELSEWHERE.get(normal(metadata["name"]), ("", ""))[0]


def parts_known(expression: str) -> bool:
    return all(re.fullmatch(r"[\w.+-]+( WITH [\w.-]+)?", part) for part in re.split(r" AND | OR ", expression))


def compatible(expression: str) -> bool:
    """Whether one of the alternatives consists of compatible licenses only. Parentheses are taken for AND, which is
    never too lenient."""

    def fits(part: str) -> bool:
        name, _, exception = part.strip("() ").partition(" WITH ")
        return name in COMPATIBLE and (not exception or exception in EXCEPTIONS)

    alternatives = [expression] if "(" in expression else expression.split(" OR ")
    return bool(expression) and any(
        all(fits(part) for part in re.split(r" AND | OR ", alternative)) for alternative in alternatives
    )


def judged(packages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """A line for each package, and those that are refused."""
    lines, refused = [], []
    for metadata in sorted(packages, key=lambda entry: normal(entry["name"])):
        name, license_ = normal(metadata["name"]), license_of(metadata)
        reason = next((why for start, why in ALLOWED.items() if name.startswith(start)), "")
        line = f"{name} {metadata['version']}: {license_ or 'no license named'}"
        if name in READ_ELSEWHERE and license_ == READ_ELSEWHERE[name][0]:
            line += f" ({READ_ELSEWHERE[name][1]})"
        if not compatible(license_):
            if reason:
                line += f" (allowed: {reason})"
            else:
                refused.append(line)
        lines.append(line)
    return lines, refused
