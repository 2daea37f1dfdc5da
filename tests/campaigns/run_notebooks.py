# SPDX-License-Identifier: Apache-2.0
"""Runs the tutorials, each in a kernel and a folder of its own: `python tests/campaigns/run_notebooks.py [NAME ...]`.

With --write what they print is stored in them, which the documentation's pages show. Exit status 1 if a tutorial stops
with an error, which a broken assertion is too; 2 if none could be run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
CELL_SECONDS = 600

# What each tutorial needs beside the package, by module; ordered as a reader would go.
NEEDS = {
    "photos": ("torch", "sklearn", "PIL", "typer", "matplotlib", "ai_edge_litert"),
    "keywords": ("torch", "typer", "matplotlib", "ai_edge_litert"),
    "detector": ("torch", "ai_edge_litert"),
    "keras": ("keras", "jax", "sklearn", "ai_edge_litert"),
    "jax": ("jax", "flax", "optax", "sklearn", "ai_edge_litert"),
    "rules": ("torch", "sklearn", "ai_edge_litert"),
    "plan": ("torch", "sklearn", "matplotlib", "ai_edge_litert", "tflite_micro"),
    "report": ("torch", "sklearn", "typer", "matplotlib", "ai_edge_litert"),
    "debugging": ("torch", "sklearn", "ai_edge_litert"),
    "microcontroller": ("torch", "sklearn", "ai_edge_litert", "tflite_micro"),
}
RUNNER = ("nbclient", "ipykernel")


def missing(name: str) -> list[str]:
    """Modules that the tutorial or its execution lacks here."""
    return [module for module in (*RUNNER, *NEEDS[name]) if importlib.util.find_spec(module) is None]


def execute(path: Path, folder: Path) -> Any:
    """The notebook with its output, run in `folder` by this Python.

    Raises nbclient's CellExecutionError when a cell does.
    """
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    # Nothing of the user's is read or written: no profile, no history, no kernel of another Python.
    private_variables = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    with (
        tempfile.TemporaryDirectory() as private,
        patch.dict(os.environ, dict.fromkeys(private_variables, private)),
    ):
        # Sockets with a short path, as they need, and in a private folder: no port at which others could listen.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{private}/kernel"}})
        NotebookClient(
            notebook,
            config=config,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return notebook


def printed(notebook: Any) -> list[str]:
    """What a reader sees below the cells, as text."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return texts


def store(notebook: Any, path: Path, folder: Path) -> None:
    """Writes what cells printed into the tutorial, and nothing of this machine: no warnings, no numbers of runs, no
    `folder`, in which it ran."""
    import nbformat

    notebook = nbformat.reads(nbformat.writes(notebook).replace(f"{folder}/", ""), as_version=4)
    stored = nbformat.read(path, as_version=4)
    for cell, run in zip(stored.cells, notebook.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = [output for output in run.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    nbformat.write(stored, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NEEDS)}; all of them if none is named")
    parser.add_argument("--write", action="store_true", help="store what they print in the tutorials")
    parser.add_argument("--quiet", action="store_true", help="do not print what the tutorials print")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NEEDS):
        parser.error(f"there is no tutorial {', '.join(sorted(unknown))}; there are {', '.join(NEEDS)}")
    if lacking := [module for module in RUNNER if importlib.util.find_spec(module) is None]:
        parser.error(f"{', '.join(lacking)} not installed: pip install '.[notebooks]'")
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    ran = failed = 0
    for name in arguments.names or NEEDS:
        if lacking := missing(name):
            print(f"{name}: left out, {', '.join(lacking)} not installed", flush=True)
            continue
        ran += 1
        begin = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(TUTORIALS / f"{name}.ipynb", Path(folder))
            if arguments.write:
                store(notebook, TUTORIALS / f"{name}.ipynb", Path(folder))
        except (CellControlSignal, DeadKernelError) as error:
            failed += 1
            print(f"{name}: FAILED after {time.monotonic() - begin:.0f} seconds\n{error}", flush=True)
            continue
        if not arguments.quiet:
            print(*printed(notebook), sep="\n")
        print(f"{name}: ran to the end in {time.monotonic() - begin:.0f} seconds", flush=True)
    return 1 if failed else 0 if ran else 2


if __name__ == "__main__":
    sys.exit(main())
