# SPDX-License-Identifier: Apache-2.0
"""Times a whole training step, float and quantization-aware, beside torch.ao's and tfmot's; all take turns.

    python bench/step.py [--networks mobilenet_v2 dscnn] [--repeats 10] [--threads 2] [--compile] [--memory] [--save]
                         [--contestants "torch float" ...] [--tfmot PYTHON] [--device cpu]

A step is forward, cross entropy, backward and SGD, on random images in channels_last; of two steps in a turn the second
counts. All contestants run the same network on the same number of images; `torch float` is built of torch.nn's modules,
with as many zeros on both sides where ours has TensorFlow's padding: the same sizes and the same work. `exactqat float`
is built of this library's convolutions and batch norm. In favor of torch.ao (eager mode) ReLU6 is ReLU, which it can
fuse, and sums stay unquantized, as it does not see them.

tfmot lives in an environment of its own, given by the path of its Python:

    python3 -m venv tfmot && tfmot/bin/pip install tensorflow-cpu==2.21.0 tf_keras tensorflow-model-optimization

Machines are shared and noisy: read the ratios, and the spread beside them.
"""

from __future__ import annotations

import argparse
import copy
import json
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import exactqat as eq
from exactqat import qat
from exactqat.application.job import models, training


def inverted_residuals(
    shape: Sequence[int], classes: int, stages: Sequence[tuple[int, int, int, int, int]]
) -> nn.Module:
    """A classifier of MobileNetV2's blocks, with TensorFlow's paddings. stages: widening, channels, repeats, stride and
    window."""
    inputs = 32
    blocks: list[nn.Module] = [models.convolution(shape[0], inputs, 3, 2)]
    for widening, outputs, repeats, stride, window in stages:
        for repeat in range(repeats):
            wide, block_stride = inputs * widening, stride if repeat == 0 else 1
            block = models.InvertedResidual(inputs, wide, outputs, block_stride)
            if window != 3:
                block.depthwise[0] = qat.DepthwiseConv2d(wide, window, block_stride, bias=False)
            blocks.append(block)
            inputs = outputs
    features = nn.Sequential(*blocks, models.convolution(inputs, 1280, 1))
    return models.ImageClassifier(features, 1280, classes, 0.2)


def mobilenet_v2(shape: Sequence[int], classes: int) -> nn.Module:
    """arXiv:1801.04381, table 2."""
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    return inverted_residuals(shape, classes, [(*stage, 3) for stage in stages])


def efficientnet_lite0(shape: Sequence[int], classes: int) -> nn.Module:
    """EfficientNet-B0 (arXiv:1905.11946, table 1) without squeeze-and-excite, with ReLU6."""
    stages = [
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ]  # fmt: skip
    return inverted_residuals(shape, classes, stages)


BUILDERS = {**models.NETWORKS, "mobilenet_v2": mobilenet_v2, "efficientnet_lite0": efficientnet_lite0}
# Channels, height, width; images in a step; classes.
TASKS = {
    "mobilenet_v2": ((3, 160, 160), 8, 1000),
    "efficientnet_lite0": ((3, 224, 224), 16, 1000),
    "dscnn": ((1, 49, 10), 64, 12),
    "small_mobilenet": ((1, 8, 8), 16, 10),
}
TORCH_FLOAT, TORCH_OBSERVED, TORCH_LEARNED = "torch float", "torch.ao QAT, observed", "torch.ao QAT, learned"
OUR_FLOAT, OUR_QAT = "exactqat float", "exactqat QAT, {}"
# By the names in tfmot_step.py.
TENSORFLOW_FLOAT, TFMOT = "TensorFlow float", "tfmot QAT"
BASES = (TORCH_FLOAT, OUR_FLOAT, TORCH_OBSERVED, TORCH_LEARNED, TFMOT)
STEPS_FOR_MEMORY = 3
RESULTS = Path(__file__).parent / "results"
# Of the tables, also where output goes into a file.
WIDTH = 120

Step = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """A network, and images [batch, channels, height, width] with their labels."""

    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self.images.shape[1:])


def task(network: str, device: str | torch.device = "cpu", images_in_step: int | None = None) -> Task:
    """Always the same weights and images. images_in_step: another number than that of TASKS."""
    shape, batch, classes = TASKS[network]
    batch = images_in_step or batch
    torch.manual_seed(0)
    images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,))
    model = BUILDERS[network](shape, classes).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    case = Task(model, images.to(device), labels.to(device))
    settle(case)
    return case


@torch.no_grad()
def settle(case: Task) -> None:
    """Gives batch norms the statistics of the images, as training would: with others, calibration finds ranges that
    have nothing to do with the tensors of a step, and learned ones collapse in the first one."""
    norms = [module for module in case.model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    case.model.train()(case.images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def exchanged(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """A copy in which `make` replaces modules; it gives None for those that stay."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            replacement = make(child)
            if replacement is not None:
                setattr(parent, name, replacement)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def torch_float(case: Task) -> nn.Module:
    """The network built of torch.nn's convolutions."""
    model = copy.deepcopy(case.model)
    paddings: dict[nn.Module, tuple[int, int]] = {}

    def note(module: qat.Conv2d, inputs: tuple[torch.Tensor]) -> None:
        rows, columns = module.pads(*inputs[0].shape[2:])
        paddings[module] = (max(rows), max(columns))

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, qat.Conv2d)]
    with torch.no_grad():
        model.eval()(case.images[:1])
    for hook in hooks:
        hook.remove()
    order = iter(list(paddings.values()))

    def plain(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, qat.Conv2d):
            return None
        convolution = nn.Conv2d(
            module.in_channels, module.out_channels, module.kernel_size, module.stride, next(order),
            module.dilation, module.groups, module.bias is not None, device=module.weight.device,
        )  # fmt: skip
        convolution.load_state_dict(module.state_dict())
        return convolution

    return exchanged(model, plain)


def our_float(case: Task) -> nn.Module:
    """The network with this library's batch norm; its convolutions are this library's already."""

    def ours(module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.BatchNorm2d:
            return None
        norm = qat.FusedBatchNorm2d(module.num_features, eps=module.eps, momentum=module.momentum)
        norm.load_state_dict(module.state_dict())
        return norm.to(module.weight.device)

    return exchanged(case.model, ours)


def torch_qat(case: Task, learned: bool) -> nn.Module:
    """torch.ao's eager quantization-aware training, fused as far as it can.

    Args:
        learned: scales and zero points are parameters; otherwise observers follow averages of the extremes.
    """
    from torch.ao import quantization
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize as Learnable

    model = exchanged(torch_float(case), lambda module: nn.ReLU() if isinstance(module, nn.ReLU6) else None).train()
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    groups = []
    for path, parent in model.named_modules():
        if isinstance(parent, nn.Sequential):
            children = list(parent.named_children())
            for start, (_, child) in enumerate(children):
                run = [
                    f"{path}.{name}" if path else name
                    for (name, follower), kind in zip(children[start:], kinds, strict=False)
                    if isinstance(follower, kind)
                ]
                if isinstance(child, nn.Conv2d) and len(run) > 1:
                    groups.append(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = quantization.fuse_modules_qat(model, groups)
        fused.qconfig = quantization.get_default_qat_qconfig("x86")
        if learned:
            activation = Learnable.with_args(
                observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, use_grad_scaling=True
            )
            fused.qconfig = quantization.QConfig(activation=activation, weight=fused.qconfig.weight)
            for module in fused.modules():
                layer = module[0] if isinstance(module, torch.ao.nn.intrinsic._FusedModule) else module
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    weight = Learnable.with_args(
                        observer=quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
                        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0, use_grad_scaling=True,
                        channel_len=layer.weight.shape[0],
                    )  # fmt: skip
                    module.qconfig = quantization.QConfig(activation=activation, weight=weight)
        prepared = quantization.prepare_qat(nn.Sequential(quantization.QuantStub(fused.qconfig), fused).train())
        if learned:
            # As ours are calibrated: one look at the data, then gradients alone decide.
            with torch.no_grad():
                prepared(case.images)
            for module in prepared.modules():
                if isinstance(module, Learnable):
                    module.enable_param_learning()
    return prepared


def our_qat(case: Task, ranges: str) -> nn.Module:
    """This library's quantization-aware training; `ranges` is a policy, or "frozen" for the last phase."""
    prepared = qat.prepare(case.model, case.images[:2], [qat.Rule(ranges="ema" if ranges == "frozen" else ranges)])
    qat.calibrate(prepared, [case.images])
    if ranges == "frozen":
        qat.freeze(prepared)
    return prepared


CONTESTANTS: dict[str, Callable[[Task], nn.Module]] = {
    TORCH_FLOAT: torch_float,
    OUR_FLOAT: our_float,
    TORCH_OBSERVED: lambda case: torch_qat(case, learned=False),
    TORCH_LEARNED: lambda case: torch_qat(case, learned=True),
    OUR_QAT.format("ema"): lambda case: our_qat(case, "ema"),
    OUR_QAT.format("learned"): lambda case: our_qat(case, "learned"),
    OUR_QAT.format("frozen"): lambda case: our_qat(case, "frozen"),
}


COMPILED = (TORCH_FLOAT, OUR_FLOAT, OUR_QAT.format("ema"), OUR_QAT.format("learned"))


def step(model: nn.Module, case: Task) -> Step:
    """One training step, to be called again and again."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-3)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(case.images), case.labels).backward()
        optimizer.step()
        if case.images.is_cuda:
            torch.cuda.synchronize()

    return run


def steps(case: Task, compiled: bool = False, names: Sequence[str] | None = None) -> dict[str, Step]:
    """The step of every contestant in this process, or of those named; compiled: of those in COMPILED by torch.compile,
    too."""
    entries = {}
    for name, build in CONTESTANTS.items():
        if names is not None and name not in names:
            continue
        try:
            entries[name] = step(build(case), case)
        except ImportError:
            print(f"{name}: left out, this PyTorch has no torch.ao.quantization")
    for name in COMPILED if compiled else ():
        # Where sizes change between networks of the same code, PyTorch would go on with sizes that it does not know.
        compiled_model = torch.compile(CONTESTANTS[name](case).train(), fullgraph=True, dynamic=False)
        entries[f"{name}, compiled"] = step(compiled_model, case)  # type: ignore[arg-type]
    return entries


def keras_layers(model: nn.Module, shape: Sequence[int]) -> list[dict[str, Any]]:
    """The network as `tfmot_step.py` takes it: Keras layers by name, with the names of the layers they read."""

    class Layers(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, path: str) -> bool:
            return not any(True for _ in module.children())

    layers: list[dict[str, Any]] = []
    names: dict[fx.Node, str] = {}

    def add(node: fx.Node, kind: str, **settings: Any) -> None:
        names[node] = node.name
        inputs = [names[source] for source in node.all_input_nodes]
        layers.append({"name": node.name, "kind": kind, "inputs": inputs, "settings": settings})

    for node in Layers().trace(model).nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "placeholder":
            add(node, "Input", shape=[*shape[1:], shape[0]])
        elif isinstance(module, qat.Conv2d):
            if module.padding_rule != "SAME" or module.dilation != (1, 1):
                raise ValueError(f"{node.target}: only undilated convolutions with SAME padding can be built in Keras")
            common = {
                "kernel_size": module.kernel_size, "strides": module.stride, "padding": "same",
                "use_bias": module.bias is not None,
            }  # fmt: skip
            if isinstance(module, qat.DepthwiseConv2d):
                add(node, "DepthwiseConv2D", depth_multiplier=module.channel_multiplier, **common)
            else:
                add(node, "Conv2D", filters=module.out_channels, **common)
        elif isinstance(module, nn.BatchNorm2d):
            add(node, "BatchNormalization", epsilon=module.eps, momentum=1 - (module.momentum or 0.0))
        elif isinstance(module, nn.ReLU | nn.ReLU6):
            add(node, "ReLU", max_value=6.0 if isinstance(module, nn.ReLU6) else None)
        elif isinstance(module, nn.AdaptiveAvgPool2d):
            add(node, "GlobalAveragePooling2D")
        elif isinstance(module, nn.Dropout):
            add(node, "Dropout", rate=module.p)
        elif isinstance(module, nn.Linear):
            add(node, "Dense", units=module.out_features)
        elif node.target is operator.add:
            add(node, "Add")
        elif isinstance(module, nn.Identity) or node.target == "flatten":
            names[node] = names[node.all_input_nodes[0]]
        elif node.op != "output":
            raise ValueError(f"{node.target} cannot be built in Keras")
    return layers


@contextmanager
def tensorflow_steps(python: str, network: str, case: Task, threads: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """TensorFlow in another process: its versions, and a function that makes one step of a network by name and gives
    its seconds, taken over there.

    Raises:
        RuntimeError: the process ends, or builds another network; the message holds what it wrote.
    """
    _, batch, classes = TASKS[network]
    channels, height, width = case.shape
    content = {
        "layers": keras_layers(case.model, case.shape),
        "image": (height, width, channels),
        "batch": batch,
        "classes": classes,
        "threads": threads,
    }
    with tempfile.TemporaryFile("w+") as messages:
        worker = subprocess.Popen(
            [python, str(Path(__file__).with_name("tfmot_step.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True, bufsize=1,
        )  # fmt: skip
        assert worker.stdin is not None and worker.stdout is not None
        requests, answers = worker.stdin, worker.stdout

        def ask(line: str) -> dict[str, Any]:
            try:
                requests.write(line + "\n")
                answer = answers.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                messages.seek(0)
                raise RuntimeError(f"{python} cannot run tfmot:\n{messages.read()[-2000:]}")
            return dict(json.loads(answer))

        try:
            ready = ask(json.dumps(content))
            # Keras counts the running statistics too.
            expected = sum(p.numel() for p in case.model.parameters()) + sum(
                2 * module.num_features for module in case.model.modules() if isinstance(module, nn.BatchNorm2d)
            )
            if ready["parameters"] != expected:
                raise RuntimeError(f"Keras' network has {ready['parameters']} parameters, ours {expected}")
            yield ready["versions"], lambda name: float(ask(name)["seconds"])
        finally:
            requests.close()
            worker.wait()
            answers.close()


def race(entries: dict[str, Callable[[], float]], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each step, as the entries tell them; the contestants take turns of two steps.

    The second one counts. The first finds caches and memory full of another contestant's numbers, which is not how a
    training goes: there every step follows one of its own.
    """
    times: dict[str, list[float]] = {name: [] for name in entries}
    for repeat in range(warm_up + repeats):
        for name, call in entries.items():
            call()
            seconds = call()
            if repeat >= warm_up:
                times[name].append(seconds)
    return times


def timed(call: Step) -> Callable[[], float]:
    """The same call, telling its seconds."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def saved_bytes(model: nn.Module, case: Task) -> int:
    """Bytes of all memory that autograd keeps between forward and backward, parameters and statistics left out.

    Tensors that share memory count once.
    """
    model.train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # To be held, or another tensor might get the same place.
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.cross_entropy(model(case.images), case.labels)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak; 0 where the kernel does not tell."""
    status = Path("/proc/self/status")
    match = re.search(rf"^{name}:\s+(\d+) kB", status.read_text(), re.M) if status.exists() else None
    return int(match[1]) * 1024 if match else 0


def memory_of(network: str, name: str, device: str) -> dict[str, int]:
    """Both figures for one contestant; in a fresh process, as a peak remembers everything that was before."""
    imported = resident("VmRSS")
    case = task(network, device)
    model = CONTESTANTS[name](case)
    call = step(model, case)
    for _ in range(STEPS_FOR_MEMORY):
        call()
    peak = resident("VmHWM") - imported
    return {"saved_bytes": saved_bytes(model, case), "resident_peak_bytes": peak}


def memory(network: str, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """`memory_of` every contestant."""
    rows = {}
    for name in CONTESTANTS:
        command = [
            sys.executable, __file__, "--networks", network, "--memory-of", name,
            "--threads", str(options.threads), "--device", options.device,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            rows[name] = json.loads(done.stdout.splitlines()[-1])
        else:
            print(f"{name}: memory left out: {done.stderr.strip().splitlines()[-1:]}")
    return rows


def rows_of(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median milliseconds, half of the distance between the quartiles as a share of it, and the ratios."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, values in times.items():
        # Of a single value there are no quartiles.
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [medians[name]] * 3
        rows.append(
            {
                "contestant": name,
                "ms": round(1e3 * medians[name], 3),
                "spread": round((quartiles[2] - quartiles[0]) / 2 / medians[name], 3),
                "ratios": {base: round(medians[name] / medians[base], 3) for base in BASES if base in medians},
            }
        )
    return rows


def print_times(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for column in ("ms", "spread", *(f"/ {base}" for base in rows[0]["ratios"])):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = (f"{ratio:.2f}" for ratio in row["ratios"].values())
        table.add_row(row["contestant"], f"{row['ms']:.1f}", f"±{row['spread']:.0%}", *ratios)
    Console(width=WIDTH).print(table)


def print_memory(rows: dict[str, dict[str, int]], title: str) -> None:
    table = Table(
        title=f"{title}\nsaved: kept by autograd from forward to backward, parameters left out\n"
        f"resident: peak of a fresh process that builds the network and makes {STEPS_FOR_MEMORY} steps, above that of "
        "its imports",
        title_justify="left",
    )
    table.add_column("contestant", no_wrap=True)
    for column in ("saved MiB", f"/ {TORCH_FLOAT}", "resident MiB", f"/ {TORCH_FLOAT} "):
        table.add_column(column, justify="right")
    for name, figures in rows.items():
        cells = []
        for key in ("saved_bytes", "resident_peak_bytes"):
            base = rows.get(TORCH_FLOAT, {}).get(key)
            cells += [f"{figures[key] / 2**20:.1f}", f"{figures[key] / base:.2f}" if base else "–"]
        table.add_row(name, *cells)
    Console(width=WIDTH).print(table)


def machine() -> str:
    """The processor's name and number of cores, as in the names of `bench/run.py`'s results."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line for line in lines if line.startswith("model name")), platform.machine())
    words = re.findall(r"[A-Za-z0-9]+", model.partition(":")[2] or model)
    return "-".join([*words, f"{os.cpu_count()}-cores"]).lower()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=TASKS, default=["mobilenet_v2", "dscnn"])
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each contestant, after untimed ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="these alone; others in the process cost")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; not yet tried on a GPU")
    parser.add_argument("--tfmot", metavar="PYTHON", help="the Python of an environment with tfmot, timed in turns too")
    parser.add_argument("--compile", action="store_true", help="time steps under torch.compile too (it takes minutes)")
    parser.add_argument("--memory", action="store_true", help="measure memory too, each contestant in its own process")
    parser.add_argument("--save", action="store_true", help="write bench/results/<machine>-step.json")
    parser.add_argument("--memory-of", metavar="CONTESTANT", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    try:
        device = training.accelerator_named(options.device)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    eq.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(memory_of(options.networks[0], options.memory_of, options.device)))
        return

    versions = {"exactqat": eq.__version__, "torch": torch.__version__}
    results = []
    if not options.tfmot:
        print(f"{TENSORFLOW_FLOAT}, {TFMOT}: left out, no --tfmot PYTHON given")
    for network in options.networks:
        case = task(network, device)
        size = f"{network}, images {'x'.join(map(str, case.images.shape))}"
        entries = {name: timed(call) for name, call in steps(case, options.compile, options.contestants).items()}
        if options.tfmot:
            with tensorflow_steps(options.tfmot, network, case, options.threads) as (releases, ask):
                versions |= releases
                for name in (TENSORFLOW_FLOAT, TFMOT):
                    entries[name] = lambda name=name, ask=ask: ask(name)  # type: ignore[misc]
                times = race(entries, options.repeats)
        else:
            times = race(entries, options.repeats)
        rows = rows_of(times)
        print_times(rows, f"{size}: one training step, medians of {options.repeats}, {options.threads} threads")
        result = {"network": network, "images": list(case.images.shape), "steps": rows}
        if options.memory:
            result["memory"] = memory(network, options)
            print_memory(result["memory"], f"{size}: memory of one training step")
        results.append(result)
    if options.save:
        path = RESULTS / f"{machine()}-step.json"
        path.parent.mkdir(exist_ok=True)
        settings = {"repeats": options.repeats, "threads": options.threads, "device": options.device}
        path.write_text(json.dumps({"versions": versions, "settings": settings, "results": results}, indent=1) + "\n")
        print(f"saved as {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
