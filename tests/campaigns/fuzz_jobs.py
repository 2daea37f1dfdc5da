# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile job folders: no code runs, nothing is lost, nothing ends in a traceback.

    python tests/campaigns/fuzz_jobs.py --cases 1000

makes a small finished job, and for each case a copy of it in which a few things are damaged, exchanged or forged:
bytes, fields of JSON and of checkpoints, members of archives, pickles that run a command, files that become folders.
Then a command is run there, most in a forked process and some as a user starts them. Of each it is asked that

- the canary is not there: a file that code in the folder would write if anything ran it;
- it prints no traceback and dies of no signal;
- its status is 0, 1 or 2, and 1 only if it says that integers differ;
- every file is where it was, with the content it had unless the command is there to replace it, or in the folder to
  which `--restart` moves jobs.

It prints its seed; `--seed S --case N` runs one case again, in a folder that stays, and shows what it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exactqat import cli
from exactqat.application.job import pipeline
from exactqat.application.job.settings import Settings
from exactqat.application.report import metrics as figures

SETTINGS = ["--epochs-float", "1", "--epochs-qat", "1", "--weight-bits", "4", "--activation-bits", "4", "--keep-going"]
# What every folder has and the job must ignore.
OTHERS = ("notes.txt", "w4a4/notes.txt", "training/notes.txt")
# What each command may replace.
REWRITES = {
    "verify": r"(?!)",
    "export": r"w4a4/model\.(tflite|onnx)",
    "report": r"metrics\.json|report\.html|float/checkpoint\.pt|w4a4/(checkpoint\.pt|model\.tflite)",
    "train": r"(?!)",
    "resume": r"metrics\.json|report\.html|(float|w4a4)/checkpoint\.pt|w4a4/model\.tflite|training/[\w-]+\.pt",
    "restart": r"(?!)",
    "compare": r"(?!)",
    "weights": r"(?!)",
}
# Of the processor; and by the clock, which goes on where a machine does other things, for what only waits.
SECONDS, CLOCK, BYTES = 120, 1200, 12 << 30
Content = dict[str, bytes | None]


def patterns(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8x8 with a bright row, column or diagonal in noise."""
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0, 0.5, (count, 8, 8)).astype(np.float32), np.arange(count) % 3
    for image, label in zip(x, y, strict=True):
        where = generator.integers(8)
        line = (where, slice(None)) if label == 0 else (slice(None), where) if label == 1 else (range(8), range(8))
        image[line] += 0.5
    return x, y


class Touch:
    """Unpickled, it runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


class Case:
    """One folder and what is done to it, all chosen by `choose`."""

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self.folder, self.choose = folder, choose
        self.job, self.canary = folder / "job", folder / "canary"
        self.done: list[str] = []

    def wild(self) -> Any:
        """A value that nobody expects."""
        values = [
            None, True, False, -1, 0, 1, 3, 2**31, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "", "x",
            "digits", "$x$", "\udcff", "\x1b[31m", "[red]", "[/red]", ":smile:", "../../x", "subprocess:call",
            "canary_module:build",
            "os:system", "exactqat.application.job.models:dscnn",
            "resnet8", "small_mobilenet", "x" * 5000, [], {}, [1], [1, 8, 8],
            [10**9, 8, 8], [-1, 8, 8], [0, 0, 0], ["touch", str(self.canary)], [f"touch {self.canary}"],
            {"touch": str(self.canary)}, [[[[[[]]]]]],
        ]  # fmt: skip
        return self.choose.choice(values)

    def pick(self, *patterns: str) -> Path:
        paths = [path for pattern in patterns for path in sorted(self.job.glob(pattern)) if path.is_file()]
        if not paths:
            (self.job / "more.json").touch()
        return self.choose.choice(paths) if paths else self.job / "more.json"

    def note(self, what: str, path: Path) -> None:
        self.done.append(f"{what} {path.relative_to(self.folder)}")

    def bytes_(self) -> None:
        """Flipped, zeroed, cut off, appended."""
        path = self.pick("*.json", "*/*.pt", "*/model.tflite", "w4a4/*.*", "../data.npz")
        content = bytearray(path.read_bytes() if path.exists() else b"")
        kind = self.choose.choice(["flip", "zero", "cut", "append", "empty", "noise", "numbers"])
        size = len(content)
        if kind == "flip" and size:
            for _ in range(self.choose.choice([1, 3, 50])):
                content[self.choose.randrange(size)] ^= 1 << self.choose.randrange(8)
        elif kind == "zero" and size:
            start = self.choose.randrange(size)
            length = len(content[start : start + self.choose.choice([4, 64, 1024, 10_000])])
            content[start : start + length] = bytes(length)
        elif kind == "cut" and size:
            del content[self.choose.randrange(size) :]
        elif kind == "append":
            content += self.choose.randbytes(self.choose.choice([1, 100, 10_000]))
        elif kind == "noise":
            content = bytearray(self.choose.randbytes(self.choose.choice([1, 100, 10_000])))
        elif kind == "numbers" and size > 8:
            for _ in range(self.choose.choice([1, 3])):
                start = self.choose.randrange(size // 4) * 4
                number = self.choose.choice([-1, 0, 1, 127, 255, 2**31 - 1, -(2**31)])
                content[start : start + 4] = number.to_bytes(4, "little", signed=True)
        else:
            content = bytearray()
        path.write_bytes(content)
        self.note(kind, path)

    def exchanged(self) -> None:
        """A file that is another file, a folder, a link into the void, a pipe, or gone."""
        path = self.pick("*.json", "*/*.pt", "*/model.tflite")
        kind = self.choose.choice(["other", "folder", "link", "pipe", "gone"])
        other = self.pick("*.json", "*/*.*").read_bytes() if kind == "other" else b""
        path.unlink(missing_ok=True)
        if kind == "other":
            path.write_bytes(other)
        elif kind == "folder":
            path.mkdir()
            (path / "inside.txt").write_text("mine")
        elif kind == "link":
            path.symlink_to(self.choose.choice(["nowhere", path.name, "/dev/zero", "/dev/null"]))
        elif kind == "pipe":
            os.mkfifo(path)
        self.note(kind, path)

    def json_(self) -> None:
        """A field, or the whole."""
        path = self.job / self.choose.choice(["job.json", "job.json", "metrics.json"])
        whole = [
            "[]",
            "{}",
            "null",
            "1",
            '"x"',
            "[" * 100_000,
            '{"a":' * 100_000,
            "1e999",
            "9" * 10_000,
            "{",
            "\ufeff{}",
        ]
        try:
            # A pipe by now, it would be read for ever.
            content = json.loads(path.read_bytes()) if path.is_file() else None
        except (ValueError, RecursionError):
            content = None
        if not path.is_file():
            return
        if self.choose.random() < 0.25 or not isinstance(content, dict):
            path.write_text(self.choose.choice(whole))
            self.note("other JSON in", path)
            return
        holder: Any = content
        if isinstance(content.get("settings"), dict) and path.name == "job.json" and self.choose.random() < 0.7:
            holder = content["settings"]
        name = self.choose.choice([*holder, "more"])
        holder[name] = self.wild()
        if self.choose.random() < 0.15:
            del holder[name]
        path.write_text(json.dumps(content))
        self.note(f"{name} in", path)

    def field(self) -> None:
        """Of a checkpoint, at any depth."""
        path = self.pick("w4a4/checkpoint.pt", "w4a4/checkpoint.pt", "training/*.pt")
        try:
            content = torch.load(path, weights_only=True)
        except Exception:  # noqa: BLE001 - damaged before
            return
        if not isinstance(content, dict):
            return
        holder, name = content, self.choose.choice(list(content))
        while isinstance(holder[name], dict | list) and len(holder[name]) and self.choose.random() < 0.6:
            holder = holder[name]
            name = self.choose.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[name] = self.tensor(holder[name]) if isinstance(holder[name], torch.Tensor) else self.wild()
        if self.choose.random() < 0.1 and isinstance(holder, dict):
            del holder[name]
        if self.choose.random() < 0.2 and "network" in content:
            content["network"] = self.choose.choice(["subprocess:call", "canary_module:build", "os:system"])
            content["input_shape"] = self.choose.choice([["touch", str(self.canary)], [1, 8, 8]])
        with contextlib.suppress(Exception):
            torch.save(content, path)
            self.note(f"{name} in", path)

    def tensor(self, tensor: torch.Tensor) -> Any:
        kind = self.choose.randrange(9)
        if kind == 0:
            return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor * -1
        if kind == 1:
            return tensor * 1e38
        if kind == 2:
            return tensor[..., None]
        if kind == 3:
            return tensor.to(
                self.choose.choice([torch.complex64, torch.int64, torch.bool, torch.float64, torch.bfloat16])
            )
        if kind == 4:
            return tensor.reshape(-1).to_sparse()
        if kind == 5:
            return torch.zeros(1).expand(10**12)
        if kind == 6:
            return torch.zeros(0)
        if kind == 7:
            return torch.zeros_like(tensor)
        return self.wild()

    def members(self) -> None:
        """Added to an archive, or exchanged in it, with the right checksums."""
        path = self.pick("*/*.pt", "*/*.pt", "../data.npz")
        try:
            with zipfile.ZipFile(path) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
            return
        root = members[0][0].split("/")[0] if members else "archive"
        evil = pickle.dumps(Touch(self.canary), protocol=2)
        array = io.BytesIO()
        np.save(array, np.array([Touch(self.canary)] * 60), allow_pickle=True)
        header = (
            b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"
        )
        code = f"import os; os.system(\"touch '{self.canary}'\")".encode()
        added = [
            (f"{root}/data.pkl", evil), (f"{root}/evil.pkl", evil), (f"{root}/evil.py", code), ("evil.py", code),
            ("../evil.py", code), (f"{root}/constants.pkl", evil), (f"{root}/code/__torch__.py", code),
            (f"{root}/version", b"999"), (f"{root}/byteorder", b"big"), (f"{root}/.data/serialization_id", b"0"),
            (f"{root}/data/0", b""), ("x.npy", array.getvalue()), ("y.npy", array.getvalue()), ("x.npy", header),
            ("x", b"no array"), ("y.npy", b""), ("x_train.npy", array.getvalue()), ("/absolute", b""),
        ]  # fmt: skip
        for name, content in self.choose.sample(added, self.choose.choice([1, 1, 3])):
            if self.choose.random() < 0.6:
                members = [member for member in members if member[0] != name]
            members.insert(self.choose.choice([0, len(members)]), (name, content))
            self.done.append(f"member {name!r} in {path.name}")
        pressed = zipfile.ZIP_DEFLATED if self.choose.random() < 0.2 else zipfile.ZIP_STORED
        if pressed and self.choose.random() < 0.3:
            members.append((f"{root}/data/0", bytes(100 << 20)))
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # duplicates
            with zipfile.ZipFile(path, "w", pressed) as archive:
                for name, content in members:
                    archive.writestr(name, content)

    def forged(self) -> None:
        """Whole files that run a command where they are unpickled, or that name code."""
        path = self.pick("*/*.pt", "*/*.pt", "../data.npz")
        kind = self.choose.randrange(5)
        if kind == 0:
            path.write_bytes(pickle.dumps(Touch(self.canary)))
        elif kind == 1:
            torch.save(Touch(self.canary), path)
        elif kind == 2:
            torch.save(
                {"format": 2, "rules": [], "state": Touch(self.canary)}, path, _use_new_zipfile_serialization=False
            )
        elif kind == 3:
            np.savez(
                path.with_suffix(".npz"), x=np.array([Touch(self.canary)] * 9), y=np.array([Touch(self.canary)] * 9)
            )
        else:
            with contextlib.suppress(Exception):
                delivered = self.job / "w4a4" / "checkpoint.pt"
                if delivered.is_file():
                    content = torch.load(delivered, weights_only=True)
                    content |= {"network": "subprocess:call", "input_shape": ["touch", str(self.canary)]}
                    torch.save(content, delivered)
            settings = self.job / "job.json"
            with contextlib.suppress(Exception):
                job = json.loads(settings.read_bytes() if settings.is_file() else b"")
                job["settings"]["model"] = self.choose.choice(["canary_module:build", "os:system"])
                settings.write_text(json.dumps(job))
        self.note(f"forgery {kind}", path)

    def damage(self) -> None:
        kinds = [self.bytes_, self.bytes_, self.exchanged, self.json_, self.json_, self.field, self.field, self.members,
                 self.forged]  # fmt: skip
        for _ in range(self.choose.choice([1, 1, 1, 2, 3])):
            self.choose.choice(kinds)()

    def command(self) -> tuple[str, list[str]]:
        name = self.choose.choices(list(REWRITES), [6, 4, 3, 2, 3, 1, 3, 3])[0]
        if name == "compare":
            return name, ["compare", "job", "job", *(["--html", "page.html"] if self.choose.random() < 0.5 else [])]
        if name == "weights":
            choice = self.pick("*/*.pt", "*/*.pt", "*/*.*")
            return name, ["train", "--out", "other", "--data", "data.npz", "--weights", str(choice), *SETTINGS]
        if name in ("verify", "export", "report"):
            return name, [name, "job", *(["--quiet"] if name == "verify" and self.choose.random() < 0.3 else [])]
        choice = SETTINGS if self.choose.random() < 0.5 or name == "restart" else []
        option = [] if name == "train" else [f"--{name}"]
        return name, ["train", "--out", "job", *option, *(["--data", "data.npz"] if choice else []), *choice]


def make_job(folder: Path) -> None:
    """A finished job and its data, with code beside it that must not run, and files that are others'."""
    x, y = patterns()
    np.savez(folder / "data.npz", x=x, y=y)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        # The path is relative: the data travels with the copies.
        settings = Settings(
            Path("job"), epochs_float=1, epochs_qat=1, data="data.npz", weight_bits=4, activation_bits=4
        )
        results = pipeline.run(settings, keep_going=True)
        figures.write_metrics(results)
    (folder / "job" / "report.html").write_text("<p>a report</p>")
    for name in OTHERS:
        (folder / "job" / name).write_text("mine")
    (folder / "canary_module.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('canary').touch()\ndef build(*given): raise ValueError\n"
    )


def contents(folder: Path) -> Content:
    """All files, folders left out; what is no plain file has no content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def in_a_fork(arguments: list[str], folder: Path, output: Path) -> int:
    """Runs the command line in a child of this process, which has imported everything already."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status: Any = 99
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(folder)
        limited()
        sys.argv = ["exactqat", *arguments]
        try:
            cli.main()
            status = 0
        except SystemExit as error:
            status = error.code or 0
        sys.stdout.flush()
    finally:
        os._exit(status if isinstance(status, int) else 98)


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    signal.alarm(CLOCK)


def by_itself(arguments: list[str], folder: Path, output: Path) -> int:
    with output.open("wb") as file:
        return subprocess.run(
            [sys.executable, "-m", "exactqat.cli", *arguments],
            cwd=folder, stdout=file, stderr=subprocess.STDOUT, preexec_fn=limited, check=False,
        ).returncode  # fmt: skip


def check(name: str, status: int, output: str, before: Content, folder: Path) -> list[str]:
    """What is not as it should be."""
    wrong = []
    if (folder / "canary").exists():
        wrong.append("code ran")
    if "Traceback" in output:
        wrong.append("traceback")
    if status not in (0, 1, 2):
        wrong.append(f"status {status}")
    if status == 1 and "of them differ" not in " ".join(output.split()):
        wrong.append("status 1 without a difference")
    after = contents(folder)
    # What `--restart` moved.
    aside = {key.replace("job.1/", "job/", 1): value for key, value in after.items() if key.startswith("job.1/")}
    for key, content in before.items():
        written = re.fullmatch(f"job/({REWRITES[name]})", key)
        versions = [place[key] for place in (after, aside) if key in place]
        if not versions or not (written or content in versions):
            wrong.append(f"lost {key}")
    return wrong


def run_case(seed: int, number: int, original: Path, folder: Path) -> tuple[str, int, str, list[str], list[str]]:
    choose = random.Random(f"{seed}/{number}")
    shutil.copytree(original, folder, symlinks=True)
    case = Case(folder, choose)
    case.damage()
    name, arguments = case.command()
    before = contents(folder)
    output = folder.with_suffix(".output")
    run = by_itself if choose.random() < 0.04 else in_a_fork
    status = run(arguments, folder, output)
    text = output.read_text(errors="replace")
    return name, status, text, case.done, check(name, status, text, before, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="of an earlier campaign; a new one by default")
    parser.add_argument("--case", type=int, help="run this one case of --seed and show it")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    # So that children import nothing.
    import onnx  # noqa: F401
    import rich.progress  # noqa: F401
    from ai_edge_litert import interpreter, schema_py_generated  # noqa: F401

    import exactqat.application.report.job_page  # noqa: F401

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="exactqat-jobs-"))
    (scratch / "original").mkdir()
    make_job(scratch / "original")
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    statuses: Counter[tuple[str, int]] = Counter()
    failures, began = 0, time.monotonic()
    for number in numbers:
        folder = scratch / f"case{number}"
        name, status, output, done, wrong = run_case(seed, number, scratch / "original", folder)
        statuses[name, status] += 1
        if wrong or arguments.case is not None:
            failures += bool(wrong)
            print(
                f"case {number}: {name} after {', '.join(done)}: status {status}: {wrong}\n{output[-3000:]}", flush=True
            )
        if arguments.case is None:
            shutil.rmtree(folder)
            folder.with_suffix(".output").unlink()
        else:
            print(f"its folder: {folder}")
    if arguments.case is None:
        shutil.rmtree(scratch)
    for (name, status), count in sorted(statuses.items()):
        print(f"{name:8} status {status}: {count}")
    print(f"{len(numbers):,} cases of seed {seed} in {time.monotonic() - began:.0f} s: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
