# SPDX-License-Identifier: Apache-2.0
"""Records TensorFlow's answers to the cases, its refusals of the bad calls, and its signatures, in tests/goldens.

Needs TensorFlow; nothing else in this repository does. Run it after cases were added or changed:

    python tests/campaigns/record_goldens.py [--only FAMILY ...]

FAMILY is one of the families of tests/cases.py, or `errors`, `manners` or `signatures`. Each setting of TensorFlow's
oneDNN kernels takes a process of its own. One thread is used, because TensorFlow's sums depend on their number. What
changed with respect to the files that were there is printed. A case that TensorFlow refuses, or a bad call that it
takes, is an error.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import goldens
import numpy as np
from bits import differing
from cases import FAMILIES, RESULTS, BadCall, Case, bad_calls, cases
from goldens import Golden, Goldens
from manners import PLAIN, Manner, manners, outcome

# TensorFlow's Eigen kernels are the ones whose order of operations is known, so they are asked where bits do not decide
# for oneDNN. They do for the depthwise convolution and its input gradient.
ONEDNN_BY_DEFAULT = ("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput")

CPU_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16")

PUBLIC = {
    "": ("grad_pass_through",),
    "quantization": (
        "fake_quant_with_min_max_args",
        "fake_quant_with_min_max_args_gradient",
        "fake_quant_with_min_max_vars",
        "fake_quant_with_min_max_vars_gradient",
        "fake_quant_with_min_max_vars_per_channel",
        "fake_quant_with_min_max_vars_per_channel_gradient",
        "quantize_and_dequantize",
        "quantize_and_dequantize_v2",
    ),
    "nn": ("depthwise_conv2d", "depthwise_conv2d_backprop_input", "depthwise_conv2d_backprop_filter"),
    "compat.v1": (
        "fake_quant_with_min_max_args",
        "fake_quant_with_min_max_args_gradient",
        "fake_quant_with_min_max_vars",
        "fake_quant_with_min_max_vars_gradient",
        "fake_quant_with_min_max_vars_per_channel",
        "fake_quant_with_min_max_vars_per_channel_gradient",
        "grad_pass_through",
    ),
    "compat.v1.quantization": (
        "fake_quant_with_min_max_args",
        "fake_quant_with_min_max_args_gradient",
        "fake_quant_with_min_max_vars",
        "fake_quant_with_min_max_vars_gradient",
        "fake_quant_with_min_max_vars_per_channel",
        "fake_quant_with_min_max_vars_per_channel_gradient",
        "quantize_and_dequantize",
        "quantize_and_dequantize_v2",
    ),
    "compat.v1.nn": (
        "depthwise_conv2d",
        "depthwise_conv2d_native",
        "depthwise_conv2d_native_backprop_filter",
        "depthwise_conv2d_native_backprop_input",
        "depthwise_conv2d_backprop_filter",
        "depthwise_conv2d_backprop_input",
        "fused_batch_norm",
    ),
}


def needs_onednn(case: Case) -> bool:
    """Which of TensorFlow's two builds is asked."""
    if case.tags & {"tolerance", "eigen"}:
        return False
    return "onednn" in case.tags or case.op in ONEDNN_BY_DEFAULT


def question(case: Case | BadCall) -> tuple[str, dict[str, Any]] | None:
    """The operator and arguments that TensorFlow is asked with; None if it has no answer.

    Two operators it cannot run are asked for through another version of the same numerics: version 1 of
    QuantizeAndDequantize through version 2, and given ranges along an axis in versions 2 and 4 through version 3.
    """
    arguments: dict[str, Any] = {**case.operands, **case.attributes}
    if case.op == "QuantizeAndDequantize":
        for bound in ("input_min", "input_max"):
            arguments[bound] = case.operands["input"].dtype.type(arguments[bound])
        return "QuantizeAndDequantizeV2", arguments
    if "beyond_tensorflow" not in getattr(case, "tags", ()):
        return case.op, arguments
    if case.op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"):
        mode = arguments.pop("round_mode")
        return ("QuantizeAndDequantizeV3", arguments) if mode == "HALF_TO_EVEN" else None
    return None


def ask(tensorflow: Any, op: str, arguments: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Runs one raw operator. Arrays go in as tensors of their own dtype, which TensorFlow would otherwise convert."""
    arguments = {
        key: tensorflow.constant(value)
        if isinstance(value, np.ndarray)
        else list(value)
        if isinstance(value, tuple)
        else value
        for key, value in arguments.items()
    }
    results = getattr(tensorflow.raw_ops, op)(**arguments)
    return tuple(np.asarray(r.numpy()) for r in (results if isinstance(results, tuple | list) else (results,)))


def work(onednn: bool, families: list[str], target: Path) -> None:
    """In a process of its own: asks TensorFlow and leaves the answers in `target` as pickle-free npz."""
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    answers: dict[str, np.ndarray] = {}
    for family in families:
        for case in cases(family):
            asked = question(case)
            if asked is None or needs_onednn(case) != onednn:
                continue
            results = ask(tensorflow, *asked)
            for output, result in zip(RESULTS[case.op], results, strict=True):
                answers[f"{case.name}/{output}"] = result
    np.savez(target, **answers)  # type: ignore[arg-type]


def record_families(families: list[str]) -> None:
    answers: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for onednn in (False, True):
            target = Path(folder) / f"{onednn}.npz"
            command = [sys.executable, __file__, "--worker", str(target), "--only", *families]
            environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)), **QUIET}
            subprocess.run(command, check=True, env=environment)
            with np.load(target) as file:
                answers.update({name: file[name] for name in file.files})
    for family in families:
        recorded = {}
        for case in cases(family):
            if question(case) is not None:
                outputs = {name: answers[f"{case.name}/{name}"] for name in RESULTS[case.op]}
                for name in case.expected:  # TensorFlow's own value means nothing there, and may be different each time
                    del outputs[name]
                recorded[case.name] = Golden(dict(case.operands), dict(case.attributes), outputs)
        report(family, recorded)
        goldens.save(family, Goldens(recorded, versions()))


def report(family: str, recorded: dict[str, Golden]) -> None:
    """Says what a new recording changes."""
    try:
        before = goldens.load(family).cases
    except FileNotFoundError:
        before = {}
    changed = []
    for name in sorted(set(before) & set(recorded)):
        for part in ("operands", "outputs"):
            old, new = getattr(before[name], part), getattr(recorded[name], part)
            for key in sorted(set(old) | set(new)):
                if (
                    key not in old
                    or key not in new
                    or (old[key].dtype, old[key].shape) != (new[key].dtype, new[key].shape)
                    or differing(old[key], new[key]).any()
                ):
                    changed.append(f"{name}/{key}")
    added, removed = sorted(set(recorded) - set(before)), sorted(set(before) - set(recorded))
    print(f"{family}: {len(recorded)} cases, {len(added)} new, {len(removed)} gone, {len(changed)} arrays changed")
    for name in changed:
        print(f"  changed: {name}")


def versions() -> dict[str, Any]:
    """What the goldens are recorded with."""
    import tensorflow

    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split("flags", 1)[-1].split("\n", 1)[0].split()) if cpu.exists() else set()
    return {
        "tensorflow": tensorflow.__version__,
        "numpy": np.__version__,
        "cpu_flags": " ".join(flag for flag in CPU_FLAGS if flag in flags),
        "threads": 1,
    }


def record_errors() -> None:
    """Which exception TensorFlow raises for each bad call."""
    import tensorflow

    raised: dict[str, str] = {}
    surprises = []
    for call in bad_calls():
        asked = question(call)
        assert asked is not None
        if call.aborts:
            raised[call.name] = "not run: ends the process"
            continue
        try:
            ask(tensorflow, *asked)
        except Exception as error:
            raised[call.name] = type(error).__name__
            if call.accepted:
                surprises.append(f"{call.name}: is refused although marked as accepted")
        else:
            raised[call.name] = f"accepted: {call.accepted}"
            if not call.accepted:
                surprises.append(f"{call.name}: is accepted")
    if surprises:
        raise SystemExit("TensorFlow does not do what tests/cases.py says:\n  " + "\n  ".join(surprises))
    goldens.save_json("errors", raised)
    print(f"errors: {len(raised)} calls")


def record_manners() -> None:
    """What TensorFlow makes of each argument in each form, beside NumPy arrays and beside its tensors."""
    import tensorflow

    def call(op: str, keywords: dict[str, Any]) -> list[np.ndarray]:
        results = getattr(tensorflow.raw_ops, op)(**keywords)
        return [result.numpy() for result in (results if isinstance(results, tuple | list) else (results,))]

    def ask_in(manner: Manner, to_array: Any) -> str:
        plain = {k: tensorflow.constant(v) if isinstance(v, np.ndarray) else v for k, v in manner.plain.items()}
        beside = {k: to_array(v) if isinstance(v, np.ndarray) else v for k, v in manner.plain.items()}
        keywords = beside | {manner.argument: manner.make(tensorflow.constant)}
        return outcome(lambda: call(manner.op, keywords), call(manner.op, plain), (Exception,))

    outcomes: dict[str, dict[str, str]] = {}
    for op in PLAIN:
        for manner in manners(op):
            answers = ask_in(manner, np.array), ask_in(manner, tensorflow.constant)
            outcomes.setdefault(f"{op}/{manner.argument}", {})[manner.form] = ", ".join(answers)
    goldens.save_json("manners", outcomes)
    print(f"manners: {sum(map(len, outcomes.values()))} calls")


def record_signatures() -> None:
    """Argument names, order and defaults of raw operators and public functions, and the former's output names."""
    import tensorflow
    from tensorflow.python.framework import op_def_registry

    def arguments(function: Any) -> list[dict[str, Any]]:
        described = []
        for name, parameter in inspect.signature(function).parameters.items():
            entry: dict[str, Any] = {"name": name}
            if parameter.default is not inspect.Parameter.empty:
                entry["default"] = parameter.default
            described.append(entry)
        return described

    raw = {
        op: {
            "arguments": arguments(getattr(tensorflow.raw_ops, op)),
            "outputs": [output.name for output in op_def_registry.get(op).output_arg],
        }
        for op in RESULTS
    }
    public = {}
    for namespace, functions in PUBLIC.items():
        module = tensorflow
        for part in namespace.split(".") if namespace else ():
            module = getattr(module, part)
        for function in functions:
            public[f"{namespace}.{function}".lstrip(".")] = {"arguments": arguments(getattr(module, function))}
    goldens.save_json("signatures", {"recorded_with": versions(), "raw_ops": raw, "public": public})
    print(f"signatures: {len(raw)} raw operators, {len(public)} public functions")


QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


def main() -> None:
    everything = [*FAMILIES, "errors", "manners", "signatures"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, metavar="FAMILY")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1", options.only, Path(options.worker))
        return
    os.environ.update(QUIET, TF_ENABLE_ONEDNN_OPTS="0")  # for the refusals, asked for in this process
    families = [family for family in options.only if family in FAMILIES]
    if families:
        record_families(families)
    if "errors" in options.only:
        record_errors()
    if "manners" in options.only:
        record_manners()
    if "signatures" in options.only:
        record_signatures()


if __name__ == "__main__":
    main()
