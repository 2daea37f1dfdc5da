# SPDX-License-Identifier: Apache-2.0
"""Networks that are given integers: numbers of words, and masks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from exactqat import deploy, qat  # noqa: E402

WORDS, LENGTH, FEATURES = 40, 8, 6
needs_deploy = pytest.mark.skipif(importlib.util.find_spec("ai_edge_litert") is None, reason="needs exactqat[deploy]")


class Classifier(nn.Module):
    """Words and their positions, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, FEATURES)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        return self.head(F.relu(x).mean(1))


class Attention(nn.Module):
    """One head, whose scores a mask hides; `how` the model says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        self.parts = nn.Linear(FEATURES, 3 * FEATURES)
        self.how = how

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.parts(self.words(words)).chunk(3, -1)
        if self.how == "sdpa":
            x = F.scaled_dot_product_attention(query, key, value, mask.bool()[:, None, :].expand(-1, LENGTH, -1))
        elif self.how == "decoder":
            earlier = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            x = F.scaled_dot_product_attention(query, key, value, earlier & mask.bool()[:, None, :])
        else:
            scores = query @ key.transpose(1, 2) / FEATURES**0.5
            if self.how == "added":
                hidden = (1.0 - mask[:, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
                scores = scores + hidden
            elif self.how == "where":
                scores = torch.where(mask[:, None, :] > 0, scores, -1e4)
            else:
                scores = scores.masked_fill(mask[:, None, :] == 0, -torch.inf)
            x = scores.softmax(-1) @ value
        shown = mask[..., None].to(x.dtype)
        return (x * shown).sum(1)


def words(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, WORDS, (count, LENGTH)))


def mask_of(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()


def trained(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """Prepared, a step before and after freezing, in evaluation."""
    torch.manual_seed(0)
    prepared = qat.prepare(model, inputs if len(inputs) > 1 else inputs[0])
    qat.calibrate(prepared, [inputs if len(inputs) > 1 else inputs[0]])
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for frozen in (False, True):
        if frozen:
            qat.freeze(prepared)
        optimizer.zero_grad()
        prepared(*inputs).square().mean().backward()
        optimizer.step()
    return prepared.eval()


@needs_deploy
def test_words_go_to_the_device_as_they_are_trained(tmp_path: Path) -> None:
    model = trained(Classifier(), words(4))
    graph = deploy.lower(model)
    assert graph.tensors["input"].dtype == "int32" and graph.operators[0].kind == "EMBEDDING"
    path = deploy.write_tflite(graph, tmp_path / "words.tflite")
    data = words(16, 1).numpy()
    for device in deploy.profiles_here():
        if "x86" in device or device in ("reference", "micro"):
            report = deploy.verify(graph, path, data=data, device=device)
            assert all(operator.exact and not operator.differing for operator in report.operators), report
    assert deploy.verify(graph, path, model=model, data=data).equal
    again = deploy.read_tflite(path)
    codes = deploy.simulate(graph, data)
    assert np.array_equal(deploy.simulate(again, data)[again.outputs[0]], codes[graph.outputs[0]])
    # Step by step, and as a whole.
    with torch.no_grad():
        results = [model(torch.from_numpy(data)) for _ in range(3)]
    assert torch.equal(results[0], results[2])


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs exactqat[onnx]")
def test_words_in_onnx(tmp_path: Path) -> None:
    graph = deploy.lower(trained(Classifier(), words(4)))
    path = deploy.write_onnx(graph, tmp_path / "words.onnx")
    report = deploy.verify(graph, path, words(16, 1).numpy().astype(np.int32))
    assert report.operators[0].kind == "EMBEDDING" and report.operators[0].differing == 0


def test_the_tables_gradient_is_the_originals() -> None:
    model, tokens = Classifier(), words(4)
    tokens[0] = 0
    prepared = qat.prepare(model, tokens)
    from exactqat.qat.train.torch.prepared import without_quantization

    with without_quantization(prepared):
        prepared(tokens).square().sum().backward()
    model.eval()(tokens).square().sum().backward()
    for name in ("words", "positions"):
        ours, theirs = (getattr(network, name).weight.grad for network in (prepared, model))
        assert torch.allclose(ours, theirs, atol=1e-6) and theirs.abs().max() > 0
    assert not prepared.words.weight.grad[0].any()
    before = prepared.words.weight.detach().clone()
    qat.calibrate(prepared, [tokens])
    prepared.train()(tokens).square().sum().backward()
    assert not prepared.words.weight.grad[0].any() and torch.equal(prepared.words.weight[0], before[0])


def test_a_tied_table_gets_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(tokens))

    # The self-check compares the gradient of the one tensor.
    prepared = qat.prepare(Tied(), words(3))
    assert [name for name, _ in prepared.named_parameters()] == ["words.weight"] and prepared.proof.trials


@pytest.mark.parametrize("wrong", [-1, WORDS, 2**32 + 1])
def test_numbers_outside_of_the_table(wrong: int) -> None:
    prepared = qat.prepare(Classifier(), words(2), check=False)
    tokens = words(2)
    tokens[1, 3] = wrong
    with pytest.raises(ValueError, match=f"words must contain integers in 0..39, the rows of the table .* got {wrong}"):
        prepared(tokens)
    assert all(int(count) == 0 for count in prepared._batches_seen().values())
    graph = deploy.lower(trained(Classifier(), words(2)))
    with pytest.raises(ValueError, match=f"must hold integers in 0..39, got {wrong}"):
        deploy.simulate(graph, tokens.numpy())
    with pytest.raises(TypeError, match="must contain integers, which choose rows of a table, got torch.float32"):
        prepared(tokens.float())
    with pytest.raises(TypeError, match="must be integers, got float32"):
        deploy.simulate(graph, tokens.numpy().astype(np.float32))


@needs_deploy
@pytest.mark.parametrize("how", ["sdpa", "decoder", "added", "where", "filled"])
def test_masks_hide_words_on_the_device(how: str, tmp_path: Path) -> None:
    tokens, mask = words(4), mask_of([8, 5, 3, 1])
    model = trained(Attention(how), tokens, mask)
    graph = deploy.lower(model)
    path = deploy.write_tflite(graph, tmp_path / "masked.tflite")
    data = (tokens.numpy(), mask.numpy())
    assert deploy.verify(graph, path, model=model, data=data).equal
    others = torch.where(mask > 0, tokens, words(4, 7))
    with torch.no_grad():
        assert torch.equal(model(tokens, mask), model(others, mask)) and not torch.equal(tokens, others)
    # The range of the scores is not all mask.
    assert all(grid.fixed_range is None or grid.fixed_range[0] > -1e3 for grid in model.plan.grids.values())


def test_a_mask_that_goes_elsewhere_is_refused() -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x + (1.0 - mask.float()) * -1e9

    with pytest.raises(qat.UnsupportedOperator, match="of a mask, which goes elsewhere than in front of a softmax"):
        qat.prepare(Elsewhere(), (torch.randn(2, 4), torch.ones(2, 4, dtype=torch.int64)))


def _kinds(prepared: Any) -> list[tuple[str, tuple[int, ...], int]]:
    plan = prepared.plan
    return [(step.kind, step.shape, plan.grids[step.grid].bits) for step in plan.steps]


def of_torch() -> Any:
    return qat.prepare(Classifier(), words(2))


def of_flax() -> Any:
    pytest.importorskip("flax")
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Same(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.words = nnx.Embed(WORDS, FEATURES, rngs=rngs)
            self.positions = nnx.Embed(LENGTH, FEATURES, rngs=rngs)
            self.head = nnx.Linear(FEATURES, 3, rngs=rngs)

        def __call__(self, words: Any) -> Any:
            x = self.words(words) + self.positions(jnp.arange(words.shape[1]))
            return self.head(jax.nn.relu(x).mean(1))

    return qat.prepare(Same(nnx.Rngs(0)), words(2).numpy().astype(np.int32))


@pytest.mark.parametrize("make", [of_torch, of_flax])
def test_the_plan_is_the_same_in_all_frameworks(make: Callable[[], Any]) -> None:
    prepared = make()
    assert _kinds(prepared) == [
        ("EMBEDDING", (1, LENGTH, FEATURES), 8),
        ("ADD", (1, LENGTH, FEATURES), 8),
        ("MEAN", (1, FEATURES), 8),
        ("FULLY_CONNECTED", (1, 3), 8),
    ]
    assert prepared.plan.inputs[0].rows == WORDS


@pytest.mark.slow
def test_flax_trains_the_table() -> None:
    prepared = of_flax()
    import jax

    batch = words(4).numpy().astype(np.int32)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, [batch])

    def loss(params: Any) -> Any:
        return (prepared.apply(params, state, batch, train=True)[0] ** 2).sum()

    gradients = jax.grad(loss)(params)["model"]
    table = np.asarray(jax.tree.leaves(jax.tree.map(np.asarray, gradients))[-1])
    assert {leaf.shape: np.abs(leaf).max() > 0 for leaf in map(np.asarray, jax.tree.leaves(gradients))}[
        (WORDS, FEATURES)
    ], table
    with pytest.raises(ValueError, match="integers in 0..39"):
        prepared.apply(params, state, batch + WORDS)
