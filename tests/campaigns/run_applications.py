# SPDX-License-Identifier: Apache-2.0
"""Networks of keras.applications, tfmot's answer beside ours: tests/campaigns/applications.json and the table in
docs/from-tfmot.md. Random weights, small images, each network in a process of its own.

    KERAS_BACKEND=jax python tests/campaigns/keras_networks.py --applications MobileNet ... > rows
    python tests/campaigns/run_applications.py --ours rows       keeps what those lines say
    python tests/campaigns/run_applications.py --tfmot           asks tfmot, in an environment that holds
                                                       tensorflow-cpu tf_keras tensorflow-model-optimization
    python tests/campaigns/run_applications.py                   writes the table again

tfmot is asked as its guide does it: `quantize_model`, one batch of `fit`, `TFLiteConverter` with `Optimize.DEFAULT`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS = HERE / "applications.json"
PAGE = HERE.parents[1] / "docs" / "from-tfmot.md"
BEGIN = "<!-- tests/campaigns/run_applications.py: begin -->\n"
END = "<!-- tests/campaigns/run_applications.py: end -->\n"
NAMES = (
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large", "EfficientNetB0", "ResNet50", "DenseNet121"),
    *("NASNetMobile", "ConvNeXtTiny", "Xception", "VGG16"),
)
# The smallest images that these take, as in keras_networks.py.
SIDES = {"Xception": 71}


def tfmot_answer(name: str) -> dict[str, Any]:
    """How far tfmot takes a network, and what it says where it stops."""
    import numpy as np
    import tensorflow as tf
    import tf_keras
    from tensorflow_model_optimization.quantization.keras import quantize_model

    side = SIDES.get(name, 64)
    tf_keras.utils.set_random_seed(0)
    model = getattr(tf_keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=5)
    stage = "quantize_model"
    try:
        quantized = quantize_model(model)
        stage = "fit"
        quantized.compile("sgd", "mse")
        images = np.random.default_rng(0).standard_normal((4, side, side, 3)).astype(np.float32)
        quantized.fit(images, np.full((4, 5), 0.1, np.float32), verbose=0)
        stage = "convert"
        converter = tf.lite.TFLiteConverter.from_keras_model(quantized)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        content = converter.convert()
        stage = "run"
        interpreter = tf.lite.Interpreter(
            model_content=content,
            experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        interpreter.allocate_tensors()
    except Exception as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"}
    dtypes = {tensor["index"]: tensor["dtype"] for tensor in interpreter.get_tensor_details()}
    # DEQUANTIZE in front of the float output is not counted: ours ends in int8 by choice.
    computing = [node for node in interpreter._get_ops_details() if node["op_name"] not in ("QUANTIZE", "DEQUANTIZE")]
    real = [node for node in computing if any(dtypes.get(index) == np.float32 for index in node["outputs"])]
    return {
        "stage": "done",
        "operators": len(computing),
        "float": len(real),
        "float_kinds": sorted({node["op_name"] for node in real}),
    }


def ask_tfmot(names: list[str], rows: dict[str, Any]) -> None:
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name in names:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        answers = [line for line in done.stdout.splitlines() if line.startswith('{"stage"')]
        if answers:
            answer = json.loads(answers[-1])
        else:
            answer = {"stage": "process", "error": f"ended with status {done.returncode}"}
        rows.setdefault(name, {})["tfmot"] = answer
        print(name, answer, flush=True)


def keep_ours(lines: str, rows: dict[str, Any]) -> None:
    """What `keras_networks.py --applications` printed."""
    for backend, name, count in re.findall(r"^(\w+) (\w+): (\d+) integers compared, 0 differ$", lines, re.M):
        rows.setdefault(name, {})["ours"] = {"backend": backend, "integers": int(count), "differing": 0}


def said(answer: dict[str, Any] | None) -> str:
    """tfmot's answer in one cell."""
    if answer is None:
        return ""
    if answer["stage"] != "done":
        error = answer["error"]
        # Keras wraps what a layer says in a frame of its own.
        inner = [
            line for line in error.splitlines() if line and not line.startswith(("Exception encountered", "Call "))
        ]
        kind = error.partition(":")[0]
        text = inner[0] if inner and ":" not in error.splitlines()[0][len(kind) + 1 :] else " ".join(inner) or error
        text = text.removeprefix(f"{kind}: ").replace("|", "/").replace("`", "")
        text = re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", text)
        return f"`{answer['stage']}` fails: `{kind}: {text[:160]}{'…' if len(text) > 160 else ''}`"
    if answer["float"]:
        return f"{answer['float']} of {answer['operators']} operators stay float: {', '.join(answer['float_kinds'])}"
    return f"{answer['operators']} operators, all int8"


def table(rows: dict[str, Any]) -> str:
    lines = ["| network | tfmot: `quantize_model`, `fit`, converted | here |", "|---|---|---|"]
    for name in NAMES:
        row = rows.get(name, {})
        ours = row.get("ours")
        here = f"{ours['integers']:,} integers compared, {ours['differing']} differ" if ours else ""
        lines.append(f"| {name} | {said(row.get('tfmot'))} | {here} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: dict[str, Any]) -> str:
    head, rest = page.split(BEGIN)
    return head + BEGIN + table(rows) + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=[], help="networks for --tfmot")
    parser.add_argument("--tfmot", action="store_true")
    parser.add_argument("--ours", type=Path, metavar="FILE")
    parser.add_argument("--one", metavar="NAME", help="tfmot's answer for one network, here")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(tfmot_answer(options.one)))
        return
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    if options.tfmot:
        ask_tfmot(list(options.names) or list(NAMES), rows)
    if options.ours:
        keep_ours(options.ours.read_text(), rows)
    ROWS.write_text(json.dumps({name: rows[name] for name in NAMES if name in rows}, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
