# SPDX-License-Identifier: Apache-2.0
"""Sets up the emulation of ARM64 for `deploy.runtimes.emulation`: `python tests/campaigns/set_up_arm64.py`.

For Debian and derivatives. An arm64 Python comes from apt-get, a recent emulator from the system or from Debian, wheels
from pip; everything is unpacked into `emulation.folder()`, and the system is not changed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from exactqat.deploy.runtimes.emulation import CPUS, answers, folder, is_set_up, versions

_BASE = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_DOT = f"{_BASE} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
# How Linux describes each processor: Arm's part number of the core, and features as in /proc/cpuinfo.
DESCRIPTIONS = {
    "cortex-a53": ("0xd03", _BASE),
    "cortex-a76": ("0xd0b", _DOT),
    "neoverse-v1": ("0xd44", f"{_DOT} i8mm bf16"),
    "sme": ("0xd44", f"{_DOT} i8mm bf16"),
}
# Earlier emulators compute some of the newest instructions wrongly.
OLDEST_EMULATOR = 10
WHEELS = ("numpy", "ml_dtypes", "flatbuffers", "protobuf", "backports.strenum", "typing-extensions", "tqdm")


def set_up(say: Callable[[str], None] = print) -> Path:
    """Downloads and unpacks what is needed into `folder()`.

    Raises:
        RuntimeError: apt-get or dpkg is missing, or a download failed.
    """
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"this needs {' and '.join(missing)} (Debian or a derivative)")
    target = folder()
    if target.exists() and any(target.iterdir()) and not is_set_up():
        raise RuntimeError(f"{target} exists and contains something else, or an incomplete installation: remove it")
    target.mkdir(parents=True, exist_ok=True)
    say(f"ARM64 emulation in {target}")
    with tempfile.TemporaryDirectory(dir=target) as work:
        say("an arm64 Python …")
        packages = ["python3-minimal", "libpython3-stdlib", "libstdc++6", "libgomp1"]
        unpack(download(Path(work) / "system", "arm64", packages, with_needs=True), target / "system")
        python = next(
            path.name
            for path in sorted((target / "system" / "usr" / "bin").glob("python3.*"))
            if re.fullmatch(r"python3\.\d+", path.name)
        )
        say("an emulator …")
        emulator = _emulator(Path(work) / "emulator", target)
        say("LiteRT for aarch64 …")
        runtime = importlib.metadata.version("ai-edge-litert")
        packages = [*WHEELS, f"ai-edge-litert=={runtime}"]
        unpack_wheels(Path(work) / "wheels", python.removeprefix("python"), packages, target / "site")
    for name, (part, features) in DESCRIPTIONS.items():
        _describe_cpu(target / "cpus" / name, target / "system", part, features)
    content = {"python": python, "emulator": emulator, "ai-edge-litert": runtime}
    (target / "ready.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for name in CPUS:
        answers(name)
        say(f"{name} answers")
    return target


def download(
    work: Path, architecture: str, packages: Sequence[str], sources: Path | None = None, with_needs: bool = False
) -> list[Path]:
    """Downloads Debian packages, on request with all their dependencies, as if nothing were installed.

    Raises:
        RuntimeError: apt-get fails.
    """
    for name in ("state/lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    options = {
        "Dir::State": work / "state",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "false",
        **({"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "/dev/null"} if sources else {}),
    }
    command = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in options.items())]
    _call([*command, "update"])
    if with_needs:
        _call([*command, "--download-only", "install", *packages])
        return sorted((work / "cache" / "archives").glob("*.deb"))
    _call([*command, "download", *packages], cwd=work)
    return sorted(work.glob("*.deb"))


def unpack(packages: Sequence[Path], target: Path) -> None:
    """Unpacks Debian packages into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for package in packages:
        _call(["dpkg", "-x", str(package), str(target)])


def _emulator(work: Path, target: Path) -> str:
    """A recent emulator: the system's, or Debian's newest."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        path = shutil.which(name)
        if path is not None and _emulator_version(path) >= OLDEST_EMULATOR:
            return path
    work.mkdir(parents=True)
    own = Path("/etc/apt/sources.list.d/debian.sources")
    uri, signed = "http://deb.debian.org/debian", "/usr/share/keyrings/debian-archive-keyring.gpg"
    if own.is_file():
        uri = next((line.split()[1] for line in own.read_text().splitlines() if line.startswith("URIs:")), uri)
    sources = work / "newest.sources"
    sources.write_text(f"Types: deb\nURIs: {uri}\nSuites: sid\nComponents: main\nSigned-By: {signed}\n")
    machine = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
    packages = download(work, machine.stdout.strip(), ["qemu-user"], sources)
    unpack(packages, work / "root")
    emulator = target / "qemu-aarch64"
    shutil.move(work / "root" / "usr" / "bin" / "qemu-aarch64", emulator)
    return str(emulator)


def _emulator_version(path: str) -> int:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"version (\d+)", answer)
    return int(match[1]) if match else 0


def unpack_wheels(work: Path, python: str, packages: Sequence[str], target: Path) -> None:
    """Wheels of these packages, without dependencies, for a Python ("3.11") on ARM64.

    Raises:
        RuntimeError: pip fails.
    """
    tag = f"cp{python.replace('.', '')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "-d", str(work)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--no-deps"]
    command += [option for abi in (tag, "abi3", "none") for option in ("--abi", abi)]
    for platform in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{platform}_aarch64"]
    _call([*command, "--platform", "any", *packages])
    for wheel in sorted(work.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def _describe_cpu(root: Path, system: Path, part: str, features: str) -> None:
    """Writes the files in which Linux describes a processor: XNNPACK reads them, and crashes on those of another
    architecture."""
    shutil.rmtree(root, ignore_errors=True)
    devices = root / "sys/devices/system/cpu"
    (root / "proc").mkdir(parents=True)
    for name in ("lib", "usr", "etc"):
        if (system / name).exists():
            (root / name).symlink_to(os.path.relpath(system / name, root))
    lines = ["processor\t: {0}", "BogoMIPS\t: 48.00", f"Features\t: {features}", "CPU implementer\t: 0x41"]
    lines += ["CPU architecture: 8", "CPU variant\t: 0x1", f"CPU part\t: {part}", "CPU revision\t: 0", "", ""]
    (root / "proc/cpuinfo").write_text("".join("\n".join(lines).format(number) for number in range(2)))
    files = {f"{name}": "0-1" for name in ("possible", "present", "online")} | {"kernel_max": "1"}
    for number in range(2):
        topology, caches = f"cpu{number}/topology", f"cpu{number}/cache"
        files |= {f"cpu{number}/cpufreq/cpuinfo_max_freq": "2000000", f"cpu{number}/cpufreq/cpuinfo_min_freq": "600000"}
        files |= {f"{topology}/physical_package_id": "0", f"{topology}/core_id": str(number)}
        files |= {f"{topology}/{name}_list": "0-1" for name in ("core_siblings", "package_cpus", "cluster_cpus")}
        files |= {f"{topology}/{name}_list": str(number) for name in ("thread_siblings", "core_cpus")}
        for index, (level, size, shared) in enumerate(
            (("1", "32K", number), ("1", "32K", number), ("2", "512K", "0-1"))
        ):
            files |= {f"{caches}/index{index}/level": level, f"{caches}/index{index}/size": size}
            files[f"{caches}/index{index}/shared_cpu_list"] = str(shared)
    for name, content in files.items():
        (devices / name).parent.mkdir(parents=True, exist_ok=True)
        (devices / name).write_text(f"{content}\n")


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} failed: {(result.stderr or result.stdout).strip()[-1000:]}")


def main() -> int:
    """Sets up the emulation, or reports that it already is."""
    parser = argparse.ArgumentParser(description="Sets up the ARM64 emulation for `exactqat verify`.")
    parser.parse_args()
    if is_set_up():
        print(f"the emulation is set up in {folder()}: {versions()}")
        return 0
    try:
        set_up()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
