# SPDX-License-Identifier: Apache-2.0
"""Another commit of this repository, built into an environment that is thrown away afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def environment(reference: str | None) -> Iterator[Path | None]:
    """The interpreter of an environment with the commit of that name; None without one.

    Raises:
        ValueError: there is no such commit, or it cannot be built.
    """
    if reference is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="exactqat-base-") as folder:
        tree, target = Path(folder) / "tree", Path(folder) / "environment"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", f"{reference}^{{commit}}"], cwd=ROOT, capture_output=True)
        if archive.returncode:
            raise ValueError(f"--base: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        python = target / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(tree)]
        # The same NumPy on both sides, and what the test cases need.
        import numpy

        built = subprocess.run([*install, f"numpy=={numpy.__version__}"], capture_output=True, text=True)
        if built.returncode:
            raise ValueError(f"--base: {reference} cannot be built:\n{built.stderr[-3000:]}")
        yield python
