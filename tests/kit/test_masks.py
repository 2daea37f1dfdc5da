# SPDX-License-Identifier: Apache-2.0
"""Masks, lengths and kinds of words that networks are given, and comparisons of such integers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exactqat import deploy

WORDS, LENGTH, FEATURES = 20, 6, 8
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ai_edge_litert") is None, reason="needs exactqat[deploy]")


def sentences(count: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Words from 1 on, filled up with 0, and their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, count)
    lengths[0] = LENGTH
    words = rng.integers(1, WORDS, (count, LENGTH)) * (np.arange(LENGTH) < lengths[:, None])
    return words.astype(np.int32), lengths.astype(np.int32)


def shown_of(words: np.ndarray) -> np.ndarray:
    return (words != 0).astype(np.int32)


def computes_the_devices_integers(graph: Any, tmp_path: Path, data: Any, **trained: Any) -> None:
    path = deploy.write_tflite(graph, tmp_path / "network.tflite")
    for device in ("xnnpack", "reference", "micro"):
        if device in ("xnnpack", *deploy.profiles_here()):
            report = deploy.verify(graph, path, data=data, device=device)
            assert all(operator.exact and not operator.differing for operator in report.operators), report
    assert deploy.verify(graph, path, data=data, **trained).equal


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def torch_network(how: str) -> Any:
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional as F

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.parts = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, 3 * FEATURES)
            self.kinds = nn.Embedding(3, FEATURES)

        def forward(self, words: Any, other: Any = None) -> Any:
            x = self.words(words)
            if how == "words":
                mask = words != 0
            elif how == "later number":
                mask = words.ne(7) & (words < 15)
            elif how == "in front":
                mask = words[:, None, :].ne(0)[:, 0]
            elif how == "lengths":
                mask = torch.arange(LENGTH, device=words.device) < other[:, None]
            elif how == "repeated lengths":
                mask = other[:, None].expand(-1, LENGTH) > torch.arange(LENGTH, device=words.device)
            else:
                x = x + (other == 2).float()[..., None]
                mask = other != 0
            query, key, value = self.parts(x).chunk(3, -1)
            x = F.scaled_dot_product_attention(query, key, value, mask[:, None, :].expand(-1, LENGTH, -1))
            return (x * mask[..., None].to(x.dtype)).sum(1)

    return Network()


@pytest.mark.parametrize("how", ["words", "later number", "in front", "lengths", "repeated lengths", "kinds"])
def test_integers_are_compared_in_pytorch(how: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    words, lengths = sentences(8)
    kinds = (words != 0) * (1 + words % 2)
    features = (words, lengths) if "lengths" in how else (words, kinds) if how == "kinds" else (words,)
    arguments = tuple(torch.from_numpy(array.astype(np.int64)) for array in features)
    example: Any = arguments if len(arguments) > 1 else arguments[0]
    model = qat.prepare(torch_network(how), example)  # compared with the original, gradients too
    qat.calibrate(model, [example])
    qat.freeze(model)
    model(*arguments).square().mean().backward()
    model.eval()
    data = features if len(features) > 1 else features[0]
    computes_the_devices_integers(deploy.lower(model), tmp_path, data, model=model)


# What is counted of words, and not of masks.
OF_WORDS = ("words", "once")


def counting(how: str, length: int) -> Any:
    torch = pytest.importorskip("torch")
    from torch import nn

    class Counting(nn.Module):
        """A row for each position, which the network counts as libraries of transformers do."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 2)
            self.places = nn.Embedding(length + 3, FEATURES)
            self.kinds = nn.Embedding(2, 2)
            self.register_buffer("kinds_of_words", torch.zeros(1, length + 3, dtype=torch.long))

        def positions(self, tokens: Any) -> Any:
            if how == "words":
                shown = tokens.ne(1).int()
                return (torch.cumsum(shown, dim=1).type_as(shown) * shown).long() + 1
            if how == "less one":
                return (torch.cumsum(tokens, dim=1) * tokens - 1).long() + 2
            if how == "filled":
                return (tokens.long().cumsum(-1) - 1).masked_fill(tokens == 0, 1)
            if how == "from the end":
                return tokens.flip(1).cumsum(1).flip(1)
            return (tokens == 1).long()

        def forward(self, tokens: Any) -> Any:
            positions = self.positions(tokens)
            places = self.places(positions)
            if how not in OF_WORDS:
                return places
            # All kinds are 0, wherever they are taken from.
            kinds = torch.gather(self.kinds_of_words.expand(tokens.shape[0], -1), 1, positions)
            return places, self.words(tokens) + self.kinds(kinds)

    return Counting()


@pytest.mark.parametrize(
    ("how", "length"),
    [(how, 7) for how in (*OF_WORDS, "less one", "filled", "from the end")]
    + [(how, 300) for how in ("words", "less one", "filled")],  # counted in 16 bits
)
def test_positions_are_counted_in_pytorch(how: str, length: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    rng = np.random.default_rng(0)
    words = rng.integers(2, WORDS, (4, length))
    words[1:, length // 2 :], words[2, :2] = 1, 1
    tokens = torch.from_numpy(words if how in OF_WORDS else (words > 1).astype(np.int64))
    network = counting(how, length)
    positions = network.positions(tokens)
    model = qat.prepare(network, tokens)
    qat.calibrate(model, [tokens])
    qat.freeze(model)
    sum(leaf.square().mean() for leaf in torch.utils._pytree.tree_leaves(model(tokens))).backward()
    graph, data = deploy.lower(model.eval()), tokens.numpy().astype(np.int32)
    computes_the_devices_integers(graph, tmp_path, data, model=model)
    looked_up = next(operator for operator in graph.operators if operator.outputs[0] == graph.outputs[0])
    codes = graph.tensors[looked_up.inputs[1]].data
    if how not in OF_WORDS:
        data = deploy.quantize(data.astype(np.float32), graph.tensors[graph.inputs[0]].quantization)
    for device in ("xnnpack", "reference", "micro"):
        assert np.array_equal(deploy.simulate(graph, data, device)[graph.outputs[0]], codes[positions])


def test_an_integer_that_is_counted_is_a_mask_only_if_the_example_is_one() -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    with pytest.raises(qat.UnsupportedOperator, match="by numbers that the network computes"):
        qat.prepare(counting("less one", LENGTH), torch.full((2, LENGTH), 2))


def test_rows_that_pytorch_would_take_from_the_end_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(LENGTH, FEATURES))

        def forward(self, mask: Any) -> Any:
            return self.table[mask.cumsum(1) - 1]

    with pytest.raises(qat.UnsupportedOperator, match=f"can be -1..{LENGTH - 1}, of a table of {LENGTH} rows"):
        qat.prepare(Indexed(), torch.ones(2, LENGTH, dtype=torch.int64))


def test_lengths_beyond_the_longest_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    words, lengths = (torch.from_numpy(array.astype(np.int64)) for array in sentences())
    model = qat.prepare(torch_network("lengths"), (words, lengths))
    with pytest.raises(ValueError, match=f"other must contain integers in 0..{LENGTH}, .* got {LENGTH + 1}"):
        model(words, lengths + 1)


@pytest.mark.parametrize("how", ["attention", "scores", "filled"])
@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min), -1e4])
def test_masks_of_real_numbers_in_pytorch(how: str, hidden: float, tmp_path: Path) -> None:
    """Added to scores: the model's own argument, or made within it."""
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch.nn import functional as F

    from exactqat import qat

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Linear(FEATURES, 3 * FEATURES)

        def forward(self, x: Any, mask: Any) -> Any:
            query, key, value = self.parts(x).chunk(3, -1)
            if how == "attention":
                return F.scaled_dot_product_attention(query, key, value, mask)
            if how == "filled":
                mask = torch.zeros(mask.shape[0], 1, LENGTH).masked_fill(mask.bool(), hidden)
            return (query @ key.transpose(1, 2) / 3 + mask).softmax(-1) @ value

    words, _ = sentences(8)
    empty = torch.from_numpy(words == 0)[:, None]
    mask = empty.long() if how == "filled" else torch.zeros(empty.shape).masked_fill(empty, hidden)
    x = torch.randn(8, LENGTH, FEATURES)
    model = qat.prepare(Network(), (x, mask))
    qat.calibrate(model, [(x, mask)])
    qat.freeze(model)
    model(x, mask).square().mean().backward()
    model.eval()
    computes_the_devices_integers(deploy.lower(model), tmp_path, (x.numpy(), mask.numpy()), model=model)
    # What is hidden counts nothing, and all else does.
    with torch.no_grad():
        other = torch.where(empty.transpose(1, 2), torch.randn_like(x), x)
        shown = ~empty[:, 0]
        assert torch.equal(model(x, mask)[shown], model(other, mask)[shown]) and not torch.equal(x, other)
        exact = Network()
        exact.load_state_dict({name: parameter.detach() for name, parameter in model.named_parameters()})
        assert (exact(x, mask) - model(x, mask)).abs().max() < 0.1


def test_scores_hidden_twice(tmp_path: Path) -> None:
    """The lowest number twice is no number (as in GPT-Neo)."""
    torch = pytest.importorskip("torch")
    from exactqat import qat

    class Network(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            shown, lowest = torch.ones(LENGTH, LENGTH).tril().bool(), torch.finfo(torch.float32).min
            scores = torch.where(shown, x @ x.transpose(1, 2), lowest)
            return (scores + torch.zeros(LENGTH, LENGTH).masked_fill(~shown, lowest)).softmax(-1) @ x

    x = torch.randn(8, LENGTH, FEATURES)
    model = qat.prepare(Network(), x)
    qat.calibrate(model, [x])
    qat.freeze(model)
    model.eval()
    computes_the_devices_integers(deploy.lower(model), tmp_path, (x.numpy(),), model=model)
    with torch.no_grad():
        assert (model(x) - Network()(x)).abs().max() < 0.1


# --- JAX --------------------------------------------------------------------------------------------------------------


def nnx_attention(how: str) -> tuple[Any, tuple[np.ndarray, ...]]:
    pytest.importorskip("flax")
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.words = nnx.Embed(WORDS, FEATURES, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=rngs)
            self.head = nnx.Linear(FEATURES, 3, rngs=rngs)

        def __call__(self, words: Any, presence: Any = None) -> Any:
            x = self.words(words)
            if how == "words":
                presence = words > 0
            if how == "lengths":
                presence = jnp.arange(LENGTH)[None] < presence[:, None]
            if how == "softmax":
                query = x.reshape(x.shape[0], LENGTH, 1, FEATURES)
                x = jax.nn.dot_product_attention(query, query, query, mask=(presence > 0)[:, None, None, :])
                x = x.reshape(x.shape[0], LENGTH, FEATURES)
            elif how == "added":
                scores = x @ x.swapaxes(1, 2) + (1.0 - presence[:, None, :].astype(x.dtype)) * jnp.finfo(x.dtype).min
                x = jax.nn.softmax(scores) @ x
            elif how == "real numbers":
                return self.head((jax.nn.softmax(x @ x.swapaxes(1, 2) / 3 + presence) @ x).sum(1))
            elif how in ("product", "least"):
                earlier = np.tril(np.ones((LENGTH, LENGTH), np.int32))
                least = jnp.minimum(presence[:, None], earlier)
                mask = (words > 0)[:, None] * earlier.astype(np.float32) if how == "product" else least
                x = jax.nn.softmax(jnp.where(mask, x @ x.swapaxes(1, 2), -1e30)) @ x
            else:
                mask = nnx.make_attention_mask(presence, presence)
                if how == "decoder":
                    mask = nnx.combine_masks(mask, nnx.make_causal_mask(words))
                x = self.attention(x, mask=mask)
            if how == "empty rows":
                return self.head(x)
            shown = presence > 0
            return self.head(jnp.where(shown[..., None], x, 0.0).sum(1))

    words, lengths = sentences(8)
    hidden = np.where(words == 0, np.float32(-1e9), np.float32(0))[:, None]
    second = {"words": (), "lengths": (lengths,), "booleans": (words != 0,), "real numbers": (hidden,)}
    second = second.get(how, (shown_of(words),))
    return Network(nnx.Rngs(0)), (words, *second)


def vmapped() -> tuple[Any, Any, tuple[np.ndarray, ...]]:
    """One example at a time, as Equinox has it."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    variables = {"words": rng.standard_normal((WORDS, FEATURES)).astype(np.float32)}
    words, _ = sentences(8)

    def network(variables: Any, words: Any, mask: Any) -> Any:
        def one(words: Any, mask: Any) -> Any:
            x = jax.vmap(lambda word: variables["words"][word])(words)
            scores = jnp.where(jnp.broadcast_to(mask[None], (LENGTH, LENGTH)) > 0, x @ x.T, -jnp.inf)
            return jax.nn.softmax(scores) @ x

        return jax.vmap(one)(words, mask)

    return network, variables, (words, shown_of(words))


def linen_attention() -> tuple[Any, tuple[np.ndarray, ...]]:
    pytest.importorskip("flax")
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, words: Any, mask: Any) -> Any:
            x = nn.Embed(WORDS, FEATURES)(words)
            x = nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_attention_mask(mask, mask))
            return nn.Dense(3)((x * mask[..., None]).sum(1))

    words, _ = sentences(8)
    return Network(), (words, shown_of(words))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        *("integers", "booleans", "decoder", "lengths", "softmax", "added", "vmap"),
        *(
            pytest.param(how, marks=pytest.mark.campaign)
            for how in ("linen", "empty rows", "words", "product", "least", "real numbers")
        ),
    ],
)
def test_masks_in_jax(how: str, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    from exactqat import qat

    if how == "vmap":
        model, variables, features = vmapped()
    elif how == "linen":
        model, features = linen_attention()
        variables = model.init(jax.random.key(0), *features)
    else:
        model, features = nnx_attention(how)
        variables = None
    more = {} if variables is None else {"variables": variables}
    prepared = qat.prepare(model, features if len(features) > 1 else features[0], **more)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, [features if len(features) > 1 else features[0]])
    params, state = prepared.freeze(params, state)
    trained = prepared.trained(params, state)
    graph = deploy.lower(trained)
    data = features if len(features) > 1 else features[0]
    computes_the_devices_integers(graph, tmp_path, data, model=trained)
