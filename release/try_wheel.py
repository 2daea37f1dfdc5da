# SPDX-License-Identifier: Apache-2.0
"""Installs wheels into empty environments and runs the kernel tests there, from what is installed; `make test-wheel`.

    python release/try_wheel.py [WHEEL ...]          those in dist/ otherwise, each with every interpreter it is for
    python release/try_wheel.py --python PATH [...]  with these interpreters
    python release/try_wheel.py --jax                JAX's tests as well, after jax was installed beside the wheel

An environment holds the wheel, NumPy, ml_dtypes, pytest and Hypothesis; the tests are copied away from the source,
which nothing finds there. A wheel for ARM64 runs under emulation, where
`python tests/campaigns/set_up_arm64.py` has set that up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from wheels import OLDEST, ROOT, STABLE, interpreters, version_of

KERNEL_TESTS = ROOT / "release" / "kernel_tests.py"
PACKAGES = ("numpy", "ml_dtypes", "pytest", "hypothesis")
FIRST_CALL = (
    "import sys, numpy as np, exactqat as eq\n"
    "x = np.linspace(-8, 8, 9, dtype=np.float32)\n"
    "y = eq.quantization.fake_quant_with_min_max_args(x)\n"
    "assert y[0] == np.float32(-6.0235295) and y[4] == 0, y\n"
    "print(eq.__version__, eq.__file__)"
)
MOST_SECONDS = 60  # of both cores, to install the wheel and to have run a first operator


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*command: str | Path, **settings: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return str(done.stdout)


def fits(wheel: Path, version: tuple[int, int]) -> bool:
    if "-abi3-" in wheel.name:
        return version >= STABLE
    return f"-cp{version[0]}{version[1]}-" in wheel.name


def check_origin(answer: str, site: Path) -> None:
    if not Path(answer.split()[-1]).is_relative_to(site):
        raise SystemExit(f"the package was not found where it was installed: {answer}")


def try_here(wheel: Path, python: str, with_jax: bool) -> None:
    with tempfile.TemporaryDirectory() as work:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        settings = {"cwd": work, "env": environment}
        before = processor_seconds()
        run(python, "-m", "venv", "venv", **settings)
        own = Path(work) / "venv" / "bin" / "python"
        install = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:")
        run(*install, wheel.resolve(), **settings)
        check_origin(run(own, "-c", FIRST_CALL, **settings), Path(work).resolve() / "venv")
        spent = processor_seconds() - before
        print(f"  installed, and a first operator has run: {spent:.1f} processor seconds", flush=True)
        if spent > MOST_SECONDS:
            raise SystemExit(f"that is more than {MOST_SECONDS}")
        run(*install, *PACKAGES, **settings)
        say_last(run(own, KERNEL_TESTS, **settings))
        if with_jax:
            run(*install, "jax", "ml_dtypes", **settings)
            say_last(run(own, KERNEL_TESTS, "--jax", **settings))


def say_last(output: str) -> None:
    print(f"  {output.strip().splitlines()[-1]}", flush=True)


def try_emulated(wheel: Path, version: tuple[int, int]) -> None:
    # As deploy.runtimes.emulation finds it, which cannot be imported here: this Python may have no NumPy.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("EXACTQAT_ARM64") or cache / "exactqat" / "arm64").resolve()
    if not (home / "ready.json").is_file():
        print("  left out: the emulation of ARM64 is not set up (python tests/campaigns/set_up_arm64.py)")
        return
    ready = json.loads((home / "ready.json").read_text("utf-8"))
    python = home / "system" / "usr" / "bin" / ready["python"]
    if not fits(wheel, emulated := tuple(map(int, python.name.removeprefix("python").split(".")))):  # type: ignore[arg-type]
        print(f"  left out: the emulated Python is {emulated[0]}.{emulated[1]}")
        return
    with tempfile.TemporaryDirectory() as work:
        site = Path(work) / "site"
        download = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", site]
        download += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "{}.{}".format(*emulated)]
        for name in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"):
            download += ["--platform", f"{name}_aarch64"]
        run(*download, *PACKAGES)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONHOME": str(home / "system" / "usr")}
        environment |= {"QEMU_LD_PREFIX": str(home / "system"), "OMP_NUM_THREADS": "1"}
        launcher = Path(work) / "python"
        emulator = ready["emulator"]
        launcher.write_text(f'#!/bin/sh\nexec {emulator} -L {home / "system"} {python} "$@"\n')
        launcher.chmod(0o755)
        check_origin(run(launcher, "-c", FIRST_CALL, cwd=work, env=environment), site)
        print("  a first operator has run", flush=True)
        say_last(run(launcher, KERNEL_TESTS, "--few", cwd=work, env=environment))


def pairs(wheels: Sequence[Path], pythons: Sequence[str]) -> Iterator[tuple[Path, str, tuple[int, int]]]:
    for wheel in wheels:
        seen = set()
        for python in pythons:
            version = version_of(python)
            if version is not None and version not in seen and fits(wheel, version):
                seen.add(version)
                yield wheel, python, version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--python", nargs="+", metavar="PATH", help="the interpreters to try")
    parser.add_argument("--jax", action="store_true", help="install jax beside the wheel and run its tests too")
    options = parser.parse_args()
    wheels = options.wheels or sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise SystemExit("there are no wheels in dist/: make wheels builds them")
    tried = 0
    native = [wheel for wheel in wheels if re.search(rf"_{platform.machine()}\.whl$", wheel.name)]
    for wheel, python, version in pairs(native, options.python or [*interpreters(), sys.executable]):
        print(f"{wheel.name} in Python {version[0]}.{version[1]} ({python})", flush=True)
        try_here(wheel, python, options.jax)
        tried += 1
    for wheel in wheels:
        if wheel.name.endswith("_aarch64.whl") and wheel not in native:
            print(f"{wheel.name} under emulation", flush=True)
            try_emulated(wheel, OLDEST)
            tried += 1
    if not tried:
        raise SystemExit("no interpreter that was found fits any of the wheels")


if __name__ == "__main__":
    main()
