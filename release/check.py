# SPDX-License-Identifier: Apache-2.0
"""Whether this could be released: everything but publishing; `make release-check`.

    python release/check.py                     all steps, in this order: see STEPS
    python release/check.py licenses links      these steps, with what an earlier run left

Each step says what it found. The exit status is 1 if any failed; the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import wheels
from dependencies import judged
from links import broken
from wheels import BUILD, ROOT, call

DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
# Extras that users install; TensorFlow's pins do not go with the tested versions of the others.
EXTRAS = ("torch", "jax", "flax", "keras", "deploy", "inspect", "onnx", "micro", "npu", "triton", "job")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NAME, VERSION = PROJECT["project"]["name"], PROJECT["project"]["version"]
# Without the folders of other checkouts, and without pip's word on its own version.
CLEAN = {"PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def say(text: str) -> None:
    print(text, flush=True)


def version() -> None:
    """The version is the same everywhere."""
    places = {
        "pyproject.toml": VERSION,
        "src/exactqat/__init__.py": _found("src/exactqat/__init__.py", r'^__version__ = "(.*)"'),
        "CITATION.cff": _found("CITATION.cff", r"^version: (.*)"),
        "CHANGELOG.md": _found("CHANGELOG.md", r"^## (\S+)"),
        "release/conda/recipe.yaml": _found("release/conda/recipe.yaml", r'^  version: "(.*)"'),
    }
    if len(set(places.values())) > 1:
        raise SystemExit("the versions differ: " + ", ".join(f"{place} {number}" for place, number in places.items()))
    say(f"{VERSION} in {', '.join(places)}")
    tagline = PROJECT["project"]["description"]
    for place in ("README.md", "docs/index.md", "release/conda/recipe.yaml"):
        if tagline not in (ROOT / place).read_text("utf-8"):
            raise SystemExit(f"{place} does not say {tagline!r}, as pyproject.toml does")


def _found(path: str, pattern: str) -> str:
    match = re.search(pattern, (ROOT / path).read_text("utf-8"), re.M)
    return match[1] if match else "none"


def packages() -> None:
    """The source distribution, and from its own contents wheels, without a network; complete by `twine` too."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    source = wheels.source_distribution(DIST)
    say(f"{source.name}.tar.gz holds what the repository holds")
    isolated = subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    for tag, python in wheels.builders([*wheels.interpreters(), sys.executable]).items():
        tools = environment(f"tools-{tag}", python)
        pip(tools, "-c", ROOT / "constraints.txt", *PROJECT["build-system"]["requires"], "cmake", "ninja")
        wheel = wheels.build(str(tools), source, platform.machine(), DIST, offline=True, isolated=isolated)
        how = "in a namespace without a network" if isolated else "with --no-index"
        say(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB, built {how}")
    say(call(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.glob("*.[wt]*"))).strip())


def environments() -> None:
    """Installed and used in a fresh environment of each Python; alone, then with what writes and runs files."""
    missing = []
    for name in PYTHONS:
        python = interpreter(name)
        if python is None:
            missing.append(name)
            continue
        fresh, package = environment(f"python-{name}", python), package_for(name)
        with tempfile.TemporaryDirectory() as elsewhere:
            smoke = Path(shutil.copy(ROOT / "release" / "smoke.py", elsewhere))
            pip(fresh, package)
            alone = call(fresh, "-I", smoke, **CLEAN).strip()
            pip(fresh, f"{package}[deploy]")
            call(fresh, "-I", smoke, "--deploy", **CLEAN)
        say(f"{package.name}: {alone}; with [deploy] a file runs as simulated")
    if missing:
        say(f"NOT TRIED, as this machine has none: Python {', '.join(missing)}")


def interpreter(name: str) -> str | None:
    """A Python of that version, such as "3.12" or, free-threaded, "3.14t"."""
    code = (
        "import sys, sysconfig; t = sysconfig.get_config_var('Py_GIL_DISABLED'); print('%d.%d' % sys.version_info[:2]"
    )
    code += " + ('t' if t else ''))"
    for path in (shutil.which(f"python{name}"), *sorted(Path.home().glob(f".pyenv/versions/{name[:4]}*/bin/python"))):
        if path:
            done = subprocess.run([str(path), "-c", code], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip() == name:
                return str(path)
    return None


def package_for(name: str) -> Path:
    """The wheel for that Python; the source distribution where the stable ABI does not reach."""
    tag = "abi3" if name not in ("3.11",) and not name.endswith("t") else f"cp{name.replace('.', '')}-"
    files = [*sorted(DIST.glob(f"*{tag}*{platform.machine()}.whl")), *DIST.glob("*.tar.gz")]
    if not files:
        raise SystemExit("dist/ is empty: run the step packages first")
    return files[0]


def sbom() -> None:
    """What an installation for `exactqat train` consists of, as CycloneDX lists it."""
    python = environment("job", sys.executable)
    here = "{}.{}".format(*sys.version_info[:2])
    pip(python, "-c", ROOT / "constraints.txt", f"{package_for(here)}[job]")
    target = DIST / f"{NAME}-{VERSION}.cdx.json"
    # pip itself is no part of it.
    call(python, "-m", "pip", "uninstall", "--yes", "--quiet", "pip", "setuptools", **CLEAN)
    call(
        Path(sys.executable).with_name("cyclonedx-py"), "environment", python, "--pyproject", ROOT / "pyproject.toml",
        "--mc-type", "library", "--output-reproducible", "--of", "JSON", "-o", target,
    )  # fmt: skip
    components = json.loads(target.read_text("utf-8"))["components"]
    unlicensed = [entry["name"] for entry in components if not entry.get("licenses")]
    say(
        f"{target.name}: {len(components)} components" + (f"; without a license field: {unlicensed}" * bool(unlicensed))
    )
    if "numpy" not in {entry["name"] for entry in components}:
        raise SystemExit(f"{target.name} lacks numpy, which is installed")


def licenses() -> None:
    """Every dependency of every extra has a license that goes with Apache-2.0."""
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {*PROJECT["project"]["dependencies"], *(entry for name in EXTRAS for entry in extras[name])}
    requirements = sorted(entry for entry in needed if not entry.startswith(f"{NAME}["))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        call(
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report,
            "-c", ROOT / "constraints.txt", *requirements, **CLEAN,
        )  # fmt: skip
        metadata = [entry["metadata"] for entry in json.loads(report.read_text("utf-8"))["install"]]
    lines, refused = judged(metadata)
    say("\n".join(lines))
    for name in ("nanobind", "robin-map"):
        if not (ROOT / "licenses" / name).exists():
            refused.append(f"{name}, which is compiled into the wheel: licenses/{name} is missing")
    if refused:
        raise SystemExit("not compatible, or not known to be:\n" + "\n".join(refused))
    say(f"{len(lines)} packages, all compatible; compiled into the wheel: nanobind (BSD-3-Clause), robin-map (MIT)")


def documentation() -> None:
    """Its pages are built from the installed package, and a warning is an error."""
    python = environment("documentation", sys.executable)
    here = "{}.{}".format(*sys.version_info[:2])
    pip(python, "-c", ROOT / "constraints.txt", f"{package_for(here)}[job,docs]")
    call(python, ROOT / "docs" / "build.py", **CLEAN)
    say(f"{len(list((ROOT / 'build' / 'docs' / 'html').rglob('*.html')))} pages without a warning")


def links() -> None:
    """Links within the built pages lead to pages and places that exist."""
    count, problems = broken(ROOT / "build" / "docs" / "html")
    if problems or not count:
        raise SystemExit("\n".join(["these links lead nowhere, or there are none:", *problems]))
    say(f"{count:,} links, all of them lead somewhere")


def figures() -> None:
    """The README's picture shows what `make demo` found."""
    metrics = ROOT / "demo" / "metrics.json"
    if not metrics.exists():
        raise SystemExit("there is no demo/metrics.json: run make demo first")
    found = json.loads(metrics.read_text("utf-8"))
    networks = [
        entry for methods in found["networks"].values() for entry in methods.values() if isinstance(entry, dict)
    ]
    accuracies = [found["float"]["test_accuracy"], *(entry["device_accuracy"] for entry in networks)]
    shown = (ROOT / "docs" / "_static" / "pictures" / "accuracy-light.svg").read_text("utf-8")
    expected = sorted(f"{accuracy:.1%}" for accuracy in accuracies)
    if sorted(re.findall(r">(\d+[.]\d%)<", shown)) != expected:
        raise SystemExit(f"the picture does not show {', '.join(expected)}: run python docs/pictures.py demo")
    say(f"{len(expected)} accuracies, those of demo/metrics.json")


STEPS = (version, figures, packages, environments, sbom, licenses, documentation, links)


def environment(name: str, python: str) -> Path:
    """The Python of a fresh virtual environment under build/release."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    call(python, "-m", "venv", folder, **CLEAN)
    return folder / "bin" / "python"


def pip(python: Path, *what: str | Path) -> None:
    call(python, "-m", "pip", "install", "--quiet", *what, **CLEAN)


def failures(steps: Sequence[str]) -> Iterator[str]:
    """Runs the steps and names those that fail."""
    for step in STEPS:
        if step.__name__ not in steps:
            continue
        say(f"\n== {step.__name__}: {(step.__doc__ or '').splitlines()[0]}")
        try:
            step()
        except SystemExit as error:
            say(f"FAILED: {error}")
            yield step.__name__
            if step is packages:
                return  # nothing to try


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.__name__ for step in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(names))
    choice = parser.parse_args()
    if unknown := set(choice.steps) - set(names):
        parser.error(f"STEP must be one of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    failed = list(failures(choice.steps or names))
    passed = f"passed: {', '.join(choice.steps)}; the other steps were not run" if choice.steps else "all steps passed"
    say(f"\nFAILED: {', '.join(failed)}" if failed else f"\n{passed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
