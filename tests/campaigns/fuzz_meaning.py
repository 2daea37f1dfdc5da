# SPDX-License-Identifier: Apache-2.0
"""Random legal PyTorch models, prepared and compared with themselves: is the network that trains the user's?

    python tests/campaigns/fuzz_meaning.py --count 2000 --seed 1
    python tests/campaigns/fuzz_meaning.py --one 1234        one model, in words
    python tests/campaigns/fuzz_meaning.py --no-check        without `prepare`'s self-check: what capture lets through

Every model is a chain of ordinary layers with one to three things in between that make trouble: custom gradients,
hooks, sizes of the batch in numbers and branches (also on one size or a few), small epsilons, gradients that stop,
tied weights, buffers of its own, branches of training, checkpoints. Either `prepare` refuses it, or two steps of plain
SGD and evaluations before and after them are the original's, with numbers of examples that the self-check does not use:
4, 7 and 128, and 1 in evaluation. Where `prepare` warns that it captured evaluation, evaluations alone are compared.
Quantization and randomness are off on both sides. The original is built a second time from its seed, never copied.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EXAMPLES = (4, 7)


# --- functions with gradients of their own ----------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 2)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient * weight * ctx.factor, (gradient * x).sum_to_size(weight.shape) / ctx.factor, None


# --- pieces: modules that keep the shape [batch, width] ---------------------------------------------------------------


class Piece(nn.Module):
    """What a subclass's `build` and `forward` say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.build()

    def build(self) -> None:
        pass


PIECES: dict[str, type[nn.Module]] = {}


def piece(kind: type[nn.Module]) -> type[nn.Module]:
    PIECES[kind.__name__] = kind
    return kind


def simple(name: str, function: Callable[[Tensor], Tensor]) -> None:
    PIECES[name] = type(name, (Piece,), {"forward": lambda self, x: function(x)})


for name, function in {
    "reversal": Reversed.apply,
    "rounded": Rounded.apply,
    "clipped": Clipped.apply,
    "straight_through_sign": lambda x: x + (torch.sign(x) - x).detach(),
    "over_the_root_of_the_batch": lambda x: x / math.sqrt(x.shape[0]),
    "over_the_batch": lambda x: x / x.shape[0],
    "times_the_batch": lambda x: x * x.size(0),
    "large_batches": lambda x: x * 2 if x.shape[0] > 100 else x,
    "even_batches": lambda x: x * 2 if x.shape[0] % 2 == 0 else x,
    "one_example": lambda x: x if x.shape[0] > 1 else x + 1,
    "one_size": lambda x: x * 2 if x.shape[0] == 128 else x,
    "one_length": lambda x: x.relu() if len(x) == 7 else x,
    "a_window_of_sizes": lambda x: x * 2 if 100 < x.size(0) < 200 else x,
    "some_sizes": lambda x: x + 1 if x.shape[0] in (7, 64, 128) else x,
    "sizes_in_a_table": lambda x: x * {7: 2.0, 128: 0.5}.get(x.shape[0], 1.0),
    "sevens": lambda x: -x if x.shape[0] % 7 == 0 else x,
    "half_a_size": lambda x: x * 2 if 0.5 * x.shape[0] == 64 else x,
    "root_of_a_size": lambda x: x * 2 if math.sqrt(x.shape[0]) > 11 and x.shape[0] < 200 else x,
    "numbers_in_all": lambda x: x * 2 if x.numel() == 128 * x.shape[1] else x,
    "asked_without_effect": lambda x: x * (1.0 if len(x) in (7, 128) else 1.0),
    "small_root": lambda x: (x * 1e-4) * torch.rsqrt((x * 1e-4).square().mean(1, keepdim=True) + 1e-6),
    "small_norm": lambda x: (x * 1e-3) / ((x * 1e-3).norm(dim=1, keepdim=True) + 1e-5),
    "short_similarity": lambda x: x * F.cosine_similarity(x * 1e-4, x.flip(1), dim=1, eps=1e-2)[:, None],
    "mapped": lambda x: torch.vmap(lambda row: row * row.sum().sigmoid())(x),
    "small_logarithm": lambda x: torch.log((x * 1e-3).relu() + 1e-5) / 10,
    "small_floor": lambda x: torch.log((x * 1e-3).clamp(min=1e-6)) / 10,
    "mean_of_the_batch": lambda x: x - x.mean(0, keepdim=True),
    "position_in_the_batch": lambda x: x + torch.arange(x.shape[0], device=x.device).unsqueeze(1),
    "filled_with_the_batch": lambda x: x + torch.full((x.shape[0], 1), float(len(x))),
    "ones_of_the_batch": lambda x: x * torch.ones(x.shape[0], 1),
    "flattened": lambda x: x.reshape(x.shape[0], -1),
    "times_1009": lambda x: x * 1009 / 1009,
    "times_1013": lambda x: x * (1 / 1013) * 1013,
    "detached": lambda x: x + x.detach(),
    "half_detached": lambda x: torch.cat([x[:, :2].detach(), x[:, 2:]], 1),
    "checkpointed": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "checkpointed_again": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
    "in_place": lambda x: x.clone().mul_(2).add_(1).clamp_(-3, 3),
    "written_slice": lambda x: _written(x),
    "noise_free_dropout": lambda x: F.dropout(x, 0.3, training=False),
    "softmax": lambda x: x.softmax(1),
    "normalized": lambda x: F.normalize(x, dim=1),
    "variance": lambda x: x - x.var(1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "minimum": lambda x: torch.minimum(x, x.flip(1)),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardswish": F.hardswish,
}.items():
    simple(name, function)


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = y[:, :-1] * 2
    return y


@piece
class no_grad_part(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x)
        return x + y


@piece
class inference_part(Piece):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = (x * 0.5).tanh()
        return x + y.clone()


@piece
class scaled(Piece):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.width))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight, 2.0)


@piece
class hook_of_a_weight(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)
        self.layer.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class hook_after_accumulation(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)

        def halve(parameter: Tensor) -> None:
            parameter.grad.mul_(0.5)

        self.layer.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class hook_of_a_tensor(Piece):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.5
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y


@piece
class forward_hook(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)
        self.layer.register_forward_hook(lambda module, inputs, result: result * 2)
        self.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class tied(Piece):
    def build(self) -> None:
        self.first = nn.Linear(self.width, self.width)
        self.second = nn.Linear(self.width, self.width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@piece
class tied_transposed(Piece):
    def build(self) -> None:
        self.first = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.first(x)), self.first.weight.t())


@piece
class partly_frozen(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class detached_weight(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight.detach(), self.layer.bias)


@piece
class running_mean(Piece):
    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(self.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


@piece
class running_mean_by_assignment(Piece):
    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(self.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@piece
class mean_for_evaluation(Piece):
    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(self.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x
        return x - self.mean


@piece
class counter(Piece):
    def build(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


@piece
class warm_up(Piece):
    def build(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * torch.clamp(self.steps / 10, max=1)


@piece
class python_counter(Piece):
    def build(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


@piece
class training_branch(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


@piece
class training_noise(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


@piece
class stochastic_depth(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            y = y * y.new_empty((y.shape[0], 1)).bernoulli_(0.8) / 0.8
        return x + y


@piece
class auxiliary_loss(Piece):
    def build(self) -> None:
        self.layer = nn.Linear(self.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.layer(x).mean()
        return x


@piece
class spectral(Piece):
    def build(self) -> None:
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(self.width, self.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class weight_normed(Piece):
    def build(self) -> None:
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(self.width, self.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@piece
class long_row(Piece):
    """A size of the user's that is a stand-in of the batch."""

    def build(self) -> None:
        self.layer = nn.Linear(1009, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(F.pad(x, (0, 1009 - self.width)))


@piece
class long_sequence(Piece):
    def build(self) -> None:
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x, (0, 1013 - self.width)).unsqueeze(1)
        return x + self.layer(rows)[:, 0, : self.width]


@piece
class attention(Piece):
    def build(self) -> None:
        self.layer = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(x.shape[0], self.width // 4, 4)
        return (tokens + self.layer(tokens, tokens, tokens, need_weights=False)[0]).flatten(1)


@piece
class recurrent(Piece):
    def build(self) -> None:
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(x.shape[0], self.width // 4, 4))[0].flatten(1)


@piece
class image(Piece):
    def build(self) -> None:
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
        self.layers.append(nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.reshape(x.shape[0], 1, 2, self.width // 2)).flatten(1)


@piece
class frozen_statistics(Piece):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(self.width)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@piece
class cumulative_statistics(Piece):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(self.width, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


ORDINARY: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "linear_relu": lambda width: nn.Sequential(nn.Linear(width, width), nn.ReLU()),
    "batch_norm": lambda width: nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
    "layer_norm": lambda width: nn.LayerNorm(width),
    "dropout": lambda width: nn.Dropout(0.25),
    "tanh": lambda width: nn.Tanh(),
    "sigmoid": lambda width: nn.Sigmoid(),
    "leaky": lambda width: nn.LeakyReLU(0.2),
}


class Chain(nn.Module):
    """Pieces one after the other; the result in one of several forms."""

    def __init__(self, names: list[str], form: str, width: int) -> None:
        super().__init__()
        self.pieces = nn.ModuleList([PIECES[n](width) if n in PIECES else ORDINARY[n](width) for n in names])
        self.head = nn.Linear(width, 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        for layer in self.pieces:
            x = layer(x)
        y = self.head(x)
        if self.form == "twice":
            return y, y
        if self.form == "dictionary":
            return {"logits": y, "features": x}
        return y.softmax(1) if self.form == "softmax" else y


def drawn(seed: int) -> tuple[list[str], str, int]:
    rng = random.Random(seed)
    names = [rng.choice(list(ORDINARY)) for _ in range(rng.randint(1, 4))]
    for _ in range(rng.randint(1, 3)):
        names.insert(rng.randint(0, len(names)), rng.choice(list(PIECES)))
    form = rng.choice(["plain", "plain", "twice", "dictionary", "softmax"])
    return ["linear_relu", *names] if rng.random() < 0.5 else names, form, rng.choice([8, 12, 16])


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Chain(*drawn(seed))
    return model if seed % 5 else model.eval()


def flat(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def trained(model: nn.Module, seed: int, width: int, train: bool) -> dict[str, np.ndarray]:
    """Everything that two steps of training and evaluations before and after them show."""
    from exactqat.qat.train.torch.proof import _Settled

    generator = torch.Generator().manual_seed(seed + 1)
    dtype = next(model.parameters()).dtype
    seen: dict[str, np.ndarray] = {}

    def keep(name: str, tensors: Any) -> None:
        seen.update({f"{name} {number}": tensor.detach().numpy().copy() for number, tensor in enumerate(flat(tensors))})

    def evaluate(moment: str) -> None:
        model.eval()
        for examples in (1, *EXAMPLES, 128):
            x = torch.randn(examples, width, generator=generator).to(dtype)
            # Not around the line before: random numbers are constant in it.
            with torch.no_grad(), _Settled():
                keep(f"{moment}, {examples}", model(x))

    evaluate("before")
    for step, examples in enumerate(EXAMPLES if train else ()):
        model.train()
        x = torch.randn(examples, width, generator=generator).to(dtype).requires_grad_()
        with _Settled():
            results = flat(model(x))
            weights = [torch.randn(result.shape, generator=generator) for result in results]
            sum((result * weight).sum() for result, weight in zip(results, weights, strict=True)).backward()
        keep(f"step {step}", results)
        keep(f"gradient of the input {step}", x.grad if x.grad is not None else [])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and not name.startswith("quantization"):
                    keep(f"gradient of {name} {step}", parameter.grad)
                    parameter -= 1e-2 * parameter.grad
                parameter.grad = None
    evaluate("after")
    return seen


def differs(exact: dict[str, np.ndarray], ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> str:
    """The first thing that is not the same, beyond what float32 makes of the original itself.

    exact: the original in float64; ours: in float32; theirs: the prepared network.
    """
    for name, value in exact.items():
        if name not in theirs:
            if name.startswith("gradient") and not np.abs(value).max() > 1e-7:
                continue
            return f"{name} is missing"
        array = theirs[name]
        if value.shape != array.shape:
            return f"{name} has shape {array.shape}, not {value.shape}"
        if not value.size:
            continue
        scale = max(float(np.abs(value).max()), 1e-3)
        error, rounding = (float(np.abs(value - result).max()) / scale for result in (array, ours[name]))
        if not error <= 1e-3 + 8 * rounding:
            return f"{name} differs by {error:.2g}, float32 by {rounding:.2g}"
    return ""


def outcome(seed: int, check: bool = True) -> tuple[str, str]:
    """(kept, refused, differing or died; why)."""
    from exactqat import qat

    _, _, width = drawn(seed)
    model = built(seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared = qat.prepare(model, torch.randn(2, width), check=check)
        except qat.UnsupportedOperator as refusal:
            return "refused", str(refusal)
        except Exception as error:
            return "died", f"{type(error).__name__}: {error}"
    warned = any("the network is that of evaluation" in str(warning.message) for warning in caught)
    prepared.quantizing = False
    trains = model.training and not warned
    kept = "evaluation kept, with a warning" if warned else "kept"
    # What rounding turns in one run (a ReLU near zero) it does not turn in the next.
    reasons = []
    for draw in range(3):
        fresh, again = built(seed), prepared if draw == 2 else _again(seed)
        try:
            ours = trained(fresh, seed + draw * 10_000, width, trains)
            exact = trained(built(seed).double(), seed + draw * 10_000, width, trains)
        except Exception as error:
            return "illegal", f"{type(error).__name__}: {error}"
        try:
            theirs = trained(again, seed + draw * 10_000, width, trains)
        except Exception as error:
            return "died", f"{type(error).__name__}: {error}"
        reasons.append(differs(exact, ours, theirs))
        if not reasons[-1]:
            return kept, ""
    return "differing", reasons[0]


def _again(seed: int) -> nn.Module:
    from exactqat import qat

    _, _, width = drawn(seed)
    prepared = qat.prepare(built(seed), torch.randn(2, width), check=False)
    prepared.quantizing = False
    return prepared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int)
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one is not None:
        print(drawn(options.one), *outcome(options.one, not options.no_check), sep="\n")
        return 0
    counts: collections.Counter[str] = collections.Counter()
    pieces: dict[str, collections.Counter[str]] = {}
    for seed in range(options.seed, options.seed + options.count):
        word, reason = outcome(seed, not options.no_check)
        counts[word] += 1
        for name in {name for name in drawn(seed)[0] if name in PIECES}:
            pieces.setdefault(name, collections.Counter())[word] += 1
        if word in ("differing", "died", "illegal"):
            print(seed, word, drawn(seed)[0], reason[:300], flush=True)
        if seed % 20 == 19:
            print(f"... {seed}: {dict(counts)}", flush=True)
    for name, outcomes in sorted(pieces.items()):
        print(f"{name:28}", dict(outcomes))
    print(f"{options.count} models: {dict(counts)}")
    return int(bool(counts["differing"] or counts["died"]))


if __name__ == "__main__":
    raise SystemExit(main())
