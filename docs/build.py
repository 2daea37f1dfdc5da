# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation: `python docs/build.py` writes build/docs/html; warnings are errors.

The operators' pages come from their declarations (`operator_pages`), the pages of the training kit from its
docstrings, those of the tutorials from notebooks (`notebook_pages`), everything else from the Markdown files of the
repository.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import notebook_pages
import operator_pages
from docstrings import markdown, parse, table

import exactqat
from exactqat import deploy, nn, qat, quantization, tune
from exactqat.operators import OPERATORS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "build" / "docs" / "source"
HTML = ROOT / "build" / "docs" / "html"

# Pages outside docs/, and their names on the site.
ELSEWHERE = {"README.md": "README.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

DECISIONS = """# Decisions

Decisions that a reader may question: the question, our choice, and what would change our mind.

```{toctree}
:glob:
:maxdepth: 1

*
```
"""


def pages() -> dict[str, str]:
    """The repository's Markdown files and notebooks: where each is, and its name on the site."""
    files = [*sorted(DOCS.rglob("*.md")), *sorted(notebook_pages.TUTORIALS.glob("*.ipynb"))]
    own = [path.relative_to(ROOT).as_posix() for path in files]
    return {name: ELSEWHERE[name] for name in ELSEWHERE if (ROOT / name).exists()} | {
        name: re.sub(r"[.]ipynb$", ".md", name.removeprefix("docs/")) for name in own
    }


def with_site_links(text: str, name: str, known: dict[str, str]) -> str:
    """A file's text with links to files changed to links to pages; links to files without a page become plain text."""

    def changed(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        file = os.path.normpath(os.path.join(os.path.dirname(name), target))
        if file not in known:
            return label
        return f"[{label}]({os.path.relpath(known[file], os.path.dirname(known[name]) or '.')}{anchor or ''})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", changed, text)


def functions_page() -> str:
    """The functions that are not operators themselves."""
    parts = [
        "# Functions",
        "What TensorFlow implements in Python on top of its operators, and what this library adds. Operators that "
        "TensorFlow exports unchanged have [their own pages](operators/index.md).",
    ]
    for module, prefix in ((quantization, "quantization."), (nn, "nn."), (exactqat, "")):
        here = {
            name: thing
            for name, thing in vars(module).items()
            if inspect.isfunction(thing) and not name.startswith("_") and name == thing.__name__
        }
        for name, function in here.items():
            parts.append(_described(f"{prefix}{name}", f"eq.{prefix}{name}", function))
            for other in (n for n, thing in vars(module).items() if thing is function and n != name):
                parts += [operator_pages.listed_as(f"exactqat.{prefix}{other}"), f"Also called `eq.{prefix}{other}`."]
    return "\n\n".join(parts) + "\n"


# What the kit's pages show, by task; other exports of a module come last.
TRAINING = {
    "From a model to one that trains as the device computes": (
        "prepare",
        "calibrate",
        "freeze",
        "PreparedModel",
        "UnsettledStatisticsWarning",
        "RangesMovedWarning",
        "UnequalPartsWarning",
        "WeightsMovedWarning",
        "FinalActivationWarning",
        "MissingData",
    ),  # fmt: skip
    "Rules": ("Rule", "UnusedRuleWarning", "UnsupportedOperator"),
    "Training that recovers": ("parameter_groups", "distillation_loss", "Distillation", "Oscillations"),
    "Layers with TensorFlow's arithmetic": ("Conv2d", "DepthwiseConv2d", "FusedBatchNorm2d"),
}
DEPLOYMENT = {
    "From a trained model to a verified file": (
        "lower",
        "write_tflite",
        "verify",
        "Report",
        "Comparison",
        "layer_values",
        "device_codes",
    ),
    "Names and axes": ("input_codes", "output_values", "Signature", "Port"),
    "Integers": ("quantize", "dequantize", "simulate", "unclaimed", "profiles_here"),
    "Streams": ("stream", "Stream"),
    "Errors": ("MissingData", "Refusal", "RuntimeRefusal"),
    "Other files": (
        "with_metadata",
        "write_onnx",
        "c_array",
        "write_c_array",
        "write_firmware",
        "aimet_encodings",
        "onnxruntime_overrides",
    ),
    "Receipts": ("receipt", "Receipt"),
    "Memory and flash": ("footprint", "Footprint", "npu_footprint", "NpuFootprint"),
    "Graphs": ("Graph", "Operator", "Tensor", "Quantization", "per_tensor", "place_codes", "Builder"),
}
TUNING = {
    "Which layers cost accuracy": ("sensitivity", "Sensitivity", "PartSensitivity", "accuracy"),
    "The gate": ("gate", "Gate", "Verdict", "OnDevice"),
    "Post-training quantization": ("search", "Search", "Trial", "Mark"),
}


def module_page(title: str, module: ModuleType, tasks: dict[str, tuple[str, ...]]) -> str:
    """Everything a module exports, from its docstrings, by task.

    Raises ValueError if a task names what the module does not export.
    """
    shown = [name for names in tasks.values() for name in names]
    missing = set(shown) - set(module.__all__)
    if missing:
        raise ValueError(f"{module.__name__} exports no {', '.join(sorted(missing))}")
    things = {name: getattr(module, name) for name in module.__all__}
    others = [
        name
        for name, thing in things.items()
        if name not in shown and (inspect.isclass(thing) or inspect.isfunction(thing))
    ]
    parts = [f"# {title}", markdown(inspect.getdoc(module) or "")]
    for task, names in {**tasks, "Others": tuple(others)}.items():
        if names:
            parts.append(f"## {task}")
            parts += [_described(name, f"{module.__name__}.{name}", things[name], "###") for name in names]
    return "\n\n".join(parts) + "\n"


def _described(heading: str, name: str, thing: Any, level: str = "##") -> str:
    """A function or a class: heading, signature, text and sections."""
    documentation = parse(thing)
    parts = [
        f"{level} {heading}",
        operator_pages.listed_as(re.sub("^eq[.]", "exactqat.", name), inspect.isclass(thing)),
    ]
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        parts.append(f"```python\n{_signature(name, thing)}\n```")
    parts += [markdown(text, _link) for text in documentation.text.split("\n\n")]
    for section, entries in documentation.sections.items():
        rows = [[", ".join(f"`{n}`" for n in entry.names), markdown(entry.text, _link)] for entry in entries]
        if any(entry.names for entry in entries):
            parts.append(table([{"Args": "argument"}.get(section, section.lower()), "meaning"], rows))
        else:
            parts.append(f"**{section}.** " + " ".join(row[1] for row in rows))
    return "\n\n".join(parts)


def _signature(name: str, thing: Any) -> str:
    """Names and defaults; types are in the text and in the stubs."""
    signature = inspect.signature(thing)
    shown = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))
    return operator_pages.wrapped(f"{name}{text}")


def _link(name: str) -> str | None:
    return operator_pages.link(name, "operators/")


def write(name: str, text: str) -> None:
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def collect() -> None:
    """Put all pages under build/docs/source, and nothing that was there before."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.rmtree(HTML, ignore_errors=True)
    known = pages()
    for name, site_name in known.items():
        if name.endswith(".ipynb"):
            write(site_name, notebook_pages.page(ROOT / name, partial(with_site_links, name=name, known=known)))
            shutil.copy(ROOT / name, (SOURCE / site_name).with_suffix(".ipynb"))
            continue
        text = with_site_links((ROOT / name).read_text(), name, known)
        # Pictures lie where Sphinx puts what is static.
        write(site_name, re.sub(r"(?<=[\"(])(docs/)?_static/", "_static/", text))
    shutil.copytree(DOCS / "_static", SOURCE / "_static")
    for op in OPERATORS.values():
        # Kernels without a TensorFlow name have pages, which others link to, but are in no list.
        write(f"operators/{op.name}.md", "---\norphan: true\n---\n\n" * (not op.raw_name) + operator_pages.page(op))
    write("decisions/index.md", DECISIONS)
    write("operators/index.md", operator_pages.overview())
    write("arithmetic.md", operator_pages.arithmetic_page())
    write("functions.md", functions_page())
    write("training.md", module_page("Training: exactqat.qat", qat, TRAINING))
    write("deployment.md", module_page("Deployment: exactqat.deploy", deploy, DEPLOYMENT))
    write("tuning.md", module_page("Accuracy: exactqat.tune", tune, TUNING))


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    collect()
    return sphinx(["-b", "html", "-c", str(DOCS), "-q", "-W", "--keep-going", str(SOURCE), str(HTML)])


if __name__ == "__main__":
    sys.exit(main())
