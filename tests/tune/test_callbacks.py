# SPDX-License-Identifier: Apache-2.0
"""The gate in other people's training loops, with their real packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

from exactqat import qat, tune  # noqa: E402

DATA = examples(128, 1)


def needs(package: str) -> Any:
    spec = importlib.util.find_spec(package)
    return pytest.mark.skipif(spec is None, reason=f"needs {package}")


def prepared() -> Any:
    images = torch.from_numpy(examples(128, 2)[0])
    model = qat.prepare(trained(), images[:2])
    qat.calibrate(model, [images])
    return model.train()


def batches() -> Any:
    images, classes = (torch.from_numpy(array) for array in examples(64, 3))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, classes), batch_size=32)


def require_best(gate: tune.Gate, verdicts: Any, model: Any, count: int) -> None:
    """The model has the weights of its best checkpoint on the device, which is not the last one."""
    assert len(verdicts) == count and gate.best is not None
    assert gate.best.score == max(verdict.score for verdict in verdicts) > verdicts[-1].score
    assert tune.Gate(DATA)(model).score == gate.best.score


def ruin(model: Any) -> None:
    with torch.no_grad():
        dict(model.named_parameters())["last.weight"].mul_(-1)


def test_a_plain_function() -> None:
    gate, model = tune.Gate(DATA), prepared()
    for epoch in range(2):
        for images, classes in batches():
            torch.nn.functional.cross_entropy(model(images), classes).backward()
        gate(model, epoch)
    assert gate.best is not None and gate.best.step in (0, 1)


def lightning_module(model: Any) -> Any:
    lightning: Any = pytest.importorskip(
        "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    )

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: Any, at: int) -> Any:
            if self.current_epoch == 1:
                ruin(self.network)
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, at: int) -> None:
            loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-4)

    return Module()


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None and importlib.util.find_spec("lightning") is None,
    reason="needs PyTorch Lightning",
)
def test_lightning(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip(
        "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    )
    gate, model = tune.Gate(DATA), prepared()
    checkpoint = tune.callbacks.lightning.DeviceCheckpoint(gate)
    trainer = lightning.Trainer(
        max_epochs=2, limit_train_batches=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(lightning_module(model), batches(), batches())
    assert float(trainer.callback_metrics["device_score"]) == pytest.approx(checkpoint.verdicts[-1].score)
    require_best(gate, checkpoint.verdicts, model, 2)


def classifier(network: Any) -> Any:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.calls = network, 0

        def forward(self, images: Any, labels: Any = None) -> Any:
            if self.training:
                self.calls += 1
                if self.calls == 2:
                    ruin(self.network)
            logits = self.network(images)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    return Classifier()


def rows() -> list[dict[str, Any]]:
    images, classes = examples(64, 3)
    return [{"images": image, "labels": int(label)} for image, label in zip(images, classes, strict=True)]


@needs("transformers")
@needs("accelerate")
def test_hugging_face(tmp_path: Path) -> None:
    import transformers

    gate, model = tune.Gate(DATA), prepared()
    checkpoint = tune.callbacks.hugging_face.DeviceCheckpoint(gate)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="no",
        per_device_train_batch_size=32, learning_rate=1e-5, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        classifier(model), arguments, train_dataset=rows(), eval_dataset=rows(), callbacks=[checkpoint]
    )
    trainer.train()
    require_best(gate, checkpoint.verdicts, model, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "package"), [("lightning", "lightning"), ("hugging_face", "transformers"), ("accelerate", "accelerate")]
)
def test_two_processes(loop: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__).with_name("two_processes.py")), loop, str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("accelerate")
def test_accelerate() -> None:
    import accelerate

    gate, model = tune.Gate(DATA), prepared()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    checkpoint = tune.callbacks.accelerate.DeviceCheckpoint(gate, accelerator)
    for epoch in range(2):
        for images, classes in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(wrapped(images), classes))
            optimizer.step()
        if epoch == 1:
            ruin(model)
        assert checkpoint(wrapped, epoch) is checkpoint.verdicts[-1]
    checkpoint.restore(wrapped)
    require_best(gate, checkpoint.verdicts, model, 2)


PROGRAM = """
import sys
import keras, numpy as np
from exactqat import qat, tune

rng = np.random.default_rng(0)
inputs = rng.normal(0, 1, (256, 6)).astype("float32")
classes = (inputs @ rng.normal(0, 1, (6, 3))).argmax(1)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
prepared = qat.prepare(model)
prepared.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

class Ruin(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            last = [variable for variable in self.model.trainable_variables if variable.shape == (16, 3)]
            last[0].assign(-last[0])

gate = tune.Gate((inputs, classes))
checkpoint = tune.callbacks.keras.DeviceCheckpoint(gate)
history = prepared.fit(inputs, classes, epochs=3, verbose=0, callbacks=[Ruin(), checkpoint])
scores = [verdict.score for verdict in checkpoint.verdicts]
assert history.history["device_score"] == scores, (history.history, scores)
assert len(scores) == 3 and gate.best.score == max(scores) > scores[-1], scores
assert tune.gate(prepared, (inputs, classes), minimum=0).score == gate.best.score
"""


@pytest.mark.slow
@needs("keras")
def test_keras() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_module_without_a_prepared_model_is_refused() -> None:
    from exactqat.tune.callbacks._modules import prepared_in

    model = prepared()
    assert prepared_in(model) is model and prepared_in(torch.nn.Sequential(model)) is model
    with pytest.raises(TypeError, match="must be or hold one model that exactqat.qat.prepare made, it holds 0"):
        prepared_in(trained())
    assert np.isfinite(tune.Gate(DATA)(model).score)
