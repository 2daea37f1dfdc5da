# SPDX-License-Identifier: Apache-2.0
"""Random calls of every declared operator on PyTorch tensors that are strange but legal.

A tensor may be more than numbers in memory: a sign or zeros that are not there, a storage that was given back, another
class' operators, a level of `torch.func`. Whatever it is, a call answers what it answers for a plain tensor of the same
values (here: NumPy's answer), in place as well, or refuses with an error of Python's. It never ends the process, which
is why each batch of the campaign has one of its own:

    python tests/campaigns/fuzz_tensors.py --cases 100000

Operators, shapes, attributes and values are those of fuzz.py; its options are `--seed` and `--case`, too.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import _tests_folder  # noqa: F401
import fuzz
import ml_dtypes
import numpy as np
import torch
from fuzz import Source, chance, choose
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

warnings.filterwarnings("ignore")

LARGEST = 1000  # elements of an operand
FAKE = FakeTensorMode(allow_non_fake_inputs=False)


def to_torch(array: np.ndarray) -> torch.Tensor:
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class Own(torch.Tensor):
    """A subclass that changes nothing."""


class Watching(torch.Tensor):
    """A subclass that is asked for every function."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor without memory that holds another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=3, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def value_of(tensor: Any) -> np.ndarray | None:
    """The numbers that a strange tensor represents; None where there are none."""
    if isinstance(tensor, Wrapper):
        return value_of(tensor.inner)
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return None
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return value_of(torch._from_functional_tensor(tensor))
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch.no_grad():
        return to_numpy(tensor.as_subclass(torch.Tensor).detach().clone().resolve_neg())


# Kinds of operands: each makes a tensor and tells the values it represents, None for those that must be refused, or
# does not apply and makes a plain one.

Made = tuple[Any, np.ndarray | None]


def _negative(array: np.ndarray, source: Source) -> Made:
    tensor = to_torch(array)
    return (torch._neg_view(tensor.neg()), array) if tensor.is_floating_point() else (tensor, array)


def _part(array: np.ndarray, imaginary: bool) -> Made:
    tensor = to_torch(array)
    if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        return tensor, array
    if imaginary:
        return torch.view_as_complex(torch.stack([tensor, tensor.neg()], -1)).conj().imag, array
    return torch.view_as_complex(torch.stack([tensor, tensor], -1)).real, array


def _zero(array: np.ndarray, source: Source) -> Made:
    tensor = to_torch(array)
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype), np.zeros_like(array)


def _inference(array: np.ndarray, source: Source) -> Made:
    with torch.inference_mode():
        return to_torch(array).clone(), array


def _freed(size: int, offset: int) -> Callable[[np.ndarray, Source], Made]:
    def made(array: np.ndarray, source: Source) -> Made:
        if array.size < 4:
            return to_torch(array), array
        memory = torch.zeros(array.size + offset, dtype=to_torch(array[:0] if array.ndim else array).dtype)
        tensor = memory[offset:].view(array.shape)
        memory.untyped_storage().resize_(size)
        return tensor, None

    return made


def _expanded(array: np.ndarray, source: Source) -> Made:
    if array.size == 0 or array.ndim == 0:
        return to_torch(array), array
    axis = source.integer(0, array.ndim - 1)
    same = np.broadcast_to(array.take([0], axis), array.shape)
    return to_torch(array.take([0], axis)).expand(array.shape), same


def _overlapping(array: np.ndarray, source: Source) -> Made:
    tensor = to_torch(array)
    if array.size == 0 or array.ndim == 0:
        return tensor, array
    tensor = tensor.as_strided(tensor.shape, (1,) * tensor.ndim)
    return tensor, to_numpy(tensor.clone())


def _strided(array: np.ndarray, source: Source) -> Made:
    tensor = to_torch(array)
    memory = torch.zeros([2 * n for n in array.shape], dtype=tensor.dtype)
    view = memory[tuple(slice(source.integer(0, 1), None, 2) for _ in array.shape)]
    return view.copy_(tensor), array


def _ended_level(array: np.ndarray, source: Source) -> Made:
    """What was seen inside of `torch.func.grad`, which is over."""
    tensor, seen = to_torch(array), []
    if not tensor.is_floating_point():
        return tensor, array

    def remember(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    torch.func.grad(remember)(tensor)
    return seen[0], array


def _leaked(array: np.ndarray, source: Source) -> Made:
    """What was seen inside of `torch.vmap`, which is over; it is no tensor any more."""
    seen: list[torch.Tensor] = []
    torch.vmap(lambda x: (seen.append(x), x)[1])(to_torch(array)[None])
    return seen[0], None


def _elsewhere(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[np.ndarray, Source], Made]:
    """A layout or dtype that no kernel takes."""

    def made(array: np.ndarray, source: Source) -> Made:
        try:
            return make(to_torch(array)), None
        except Exception:  # not for this dtype or rank, said in many ways
            return to_torch(array), array

    return made


def _like(make: Callable[[torch.Tensor], Any]) -> Callable[[np.ndarray, Source], Made]:
    return lambda array, source: (make(to_torch(array)), array)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


KINDS: dict[str, Callable[[np.ndarray, Source], Made]] = {
    "plain": _like(lambda t: t),
    "parameter": _like(lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point())),
    "leaf": _like(_leaf),
    "of a leaf": _like(lambda t: _leaf(t).view(t.shape)),
    "zero": _zero,
    "negative": _negative,
    "imaginary": lambda array, source: _part(array, True),
    "real": lambda array, source: _part(array, False),
    "subclass": _like(lambda t: t.as_subclass(Own)),
    "watching": _like(lambda t: t.as_subclass(Watching)),
    "wrapper": _like(Wrapper),
    "wrapped leaf": _like(lambda t: _leaf(Wrapper(t))),
    "wrapped negative": lambda array, source: (Wrapper(_negative(array, source)[0]), array),
    "functional": _like(torch._to_functional_tensor),
    "inference": _inference,
    "meta": _like(lambda t: t.to("meta")),
    "fake": _like(FAKE.from_tensor),
    "expanded": _expanded,
    "overlapping": _overlapping,
    "strided": _strided,
    "lazy clone": _like(lambda t: torch._lazy_clone(t.clone())),
    "ended level": _ended_level,
    "leaked": _leaked,
    "freed": _freed(0, 0),
    "freed after an offset": _freed(0, 20000),
    "shrunk": _freed(1, 2),
    "sparse": _elsewhere(lambda t: t.to_sparse()),
    "sparse rows": _elsewhere(lambda t: t.to_sparse_csr()),
    "oneDNN": _elsewhere(lambda t: t.to_mkldnn()),
    "quantized": _elsewhere(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8)),
    "nested": _elsewhere(lambda t: torch.nested.nested_tensor([t, t])),
    "jagged": _elsewhere(lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged)),
    "complex": _elsewhere(lambda t: torch.complex(t, t).conj()),
    "integer": _elsewhere(lambda t: t.isnan().to(torch.int32)),
}
# These represent ordinary numbers, so nothing is refused for them where no place for results is given.
PLAIN = {
    "plain",
    "parameter",
    "leaf",
    "of a leaf",
    "zero",
    "negative",
    "imaginary",
    "real",
    "subclass",
    "watching",
    "wrapper",
    "wrapped negative",
    "expanded",
    "overlapping",
    "strided",
    "lazy clone",
    "ended level",
}


# Contexts: each calls the function with the operands in its own way.


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


Function = Callable[..., Any]


def _within(*contexts: Callable[[], Any]) -> Callable[[Function, list[Any]], Any]:
    def run(function: Function, operands: list[Any]) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return function(*operands)

    return run


def _dual(function: Function, operands: list[Any]) -> Any:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t, torch.ones_like(t)) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in operands
        ]
        results = function(*duals)
        first = results[0] if isinstance(results, tuple) else results
        assert (
            type(first) is not torch.Tensor or first.dtype == torch.uint8 or forward_ad.unpack_dual(first) is not None
        )
        return tree_map_only(torch.Tensor, lambda t: forward_ad.unpack_dual(t).primal, results)


def _traced(function: Function, operands: list[Any]) -> Any:
    """The trace is run on the operands; what was done while tracing was the same."""
    torch.jit.trace(function, tuple(operands), check_trace=False)
    return function(*operands)


def _jvp(function: Function, operands: list[Any]) -> Any:
    places = [i for i, t in enumerate(operands) if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def of_floats(*floats: Any) -> Any:
        every = list(operands)
        for i, value in zip(places, floats, strict=True):
            every[i] = value
        return function(*every)

    floats = tuple(operands[i] for i in places)
    return torch.func.jvp(of_floats, floats, tuple(torch.ones_like(t) for t in floats))[0]


CONTEXTS: dict[str, Callable[[Function, list[Any]], Any]] = {
    "eager": _within(),
    "twice": lambda function, operands: (function(*operands), function(*operands))[1],
    "no_grad": _within(torch.no_grad),
    "inference_mode": _within(torch.inference_mode),
    "fake mode": _within(lambda: FAKE),
    "dispatch mode": _within(Passing),
    "function mode": _within(PassingFunctions),
    "profiler": _within(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "vmap": lambda function, operands: tree_map_only(
        torch.Tensor, lambda t: t[0], torch.vmap(function)(*[t[None] for t in operands])
    ),
    "functionalize": lambda function, operands: torch.func.functionalize(function)(*operands),
    "make_fx": lambda function, operands: make_fx(function)(*operands)(*operands),
    "forward mode": _dual,
    "jvp": _jvp,
    "trace": _traced,
}
RARE = {"make_fx", "trace", "profiler"}  # slow
# Contexts in which plain operands must have their answer, whatever their kind.
OPEN = {"eager", "twice", "no_grad", "dispatch mode", "function mode"}

OUT = (
    "plain",
    "parameter",
    "leaf",
    "zero",
    "negative",
    "imaginary",
    "subclass",
    "watching",
    "wrapper",
    "functional",
    "inference",
    "meta",
    "fake",
    "expanded",
    "overlapping",
    "strided",
    "lazy clone",
    "ended level",
    "leaked",
    "freed",
    "freed after an offset",
    "shrunk",
    "sparse",
    "nested",
    "quantized",
)


@dataclass
class Call:
    """`call` on operands of these kinds, in this context, into results of these kinds, if any."""

    call: fuzz.Call
    kinds: dict[str, str]
    context: str
    out: tuple[str, ...]
    backward: str  # the kind of the gradients that arrive, "" for no backward pass
    source: Source

    def __str__(self) -> str:
        chosen = f"{self.context}, operands {self.kinds}, out {self.out}, backward {self.backward!r}"
        return f"{chosen}\n{self.call}"


def generate(source: Source) -> Call:
    while True:
        call = fuzz.generate(source)
        if call.flaw or max(map(np.size, call.operands.values())) > LARGEST:
            continue
        accepted = fuzz._lowered(call, fuzz._dense(call))
        if accepted and max(spec.size for spec in accepted[0].results) <= LARGEST:
            break
    kinds = {name: choose(source, list(KINDS)) if chance(source, 55) else "plain" for name in call.op.operands}
    context = choose(source, list(CONTEXTS)) if chance(source, 60) else "eager"
    if context in RARE and chance(source, 80):
        context = "twice"
    out: tuple[str, ...] = ()
    if chance(source, 40):
        out = tuple([choose(source, OUT) if chance(source, 60) else "plain" for _ in call.op.results])
    if context not in OPEN:  # PyTorch itself would read what is not there
        kinds = {name: "freed" if kind == "shrunk" else kind for name, kind in kinds.items()}
    # PyTorch's fake tensors have no tangents and do not survive freed ones: its dispatcher stays as it was then.
    if context in ("jvp", "forward mode"):
        kinds = {name: "meta" if kind == "fake" else kind for name, kind in kinds.items()}
        out = tuple(["meta" if kind == "fake" else kind for kind in out])
    if "fake" in kinds.values() or context == "fake mode":
        kinds = {name: "plain" if kind.startswith(("freed", "shrunk")) else kind for name, kind in kinds.items()}
    backward = choose(source, ("plain", "zero", "negative", "expanded", "subclass", "wrapper")) if not out else ""
    return Call(call, kinds, context, out, backward, source)


def state() -> tuple[Any, ...]:
    """What PyTorch keeps for a thread; no call may leave it changed."""
    return (
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._get_tracing_state() is None,
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch.is_inference_mode_enabled(),
        forward_ad._current_level,
    )


def is_refusal(error: Exception) -> bool:
    """An error that a reader can act upon, ours or PyTorch's."""
    if isinstance(error, AssertionError | AttributeError):  # as PyTorch says that fake tensors and others are mixed
        return "/torch/" in traceback.extract_tb(error.__traceback__)[-1].filename
    return (
        bool(str(error))
        and isinstance(error, (ValueError, TypeError, RuntimeError, BufferError))
        and not isinstance(error, RecursionError)
    )


def check(strange: Call) -> tuple[bool, int]:
    """Run a call and compare. Returns whether it was refused and how many values were compared."""
    before = state()
    answer = _check(strange)
    if state() != before:
        raise SystemExit("the call left PyTorch in another state, in which no further one means anything")
    return answer


def _check(strange: Call) -> tuple[bool, int]:
    call, op, source = strange.call, strange.call.op, strange.source
    dense = fuzz._dense(call)
    operands: list[Any] = []
    values: dict[str, np.ndarray] = {}
    refused = False
    for name, array in dense.items():
        tensor, value = KINDS[strange.kinds[name]](array, source)
        operands.append(tensor)
        refused |= value is None
        values[name] = array if value is None else value
    try:
        answer = op(**values, **call.attributes)
        expected = answer if isinstance(answer, tuple) else (answer,)
    except (ValueError, TypeError):
        refused, expected = True, ()
    out: list[Any] = []
    before: list[np.ndarray | None] = []
    if strange.out and expected:
        for kind, array in zip(strange.out, expected, strict=True):
            tensor, value = KINDS[kind](np.full_like(array, 3), source)
            out.append(tensor)
            before.append(value)
    kinds = [strange.kinds[name] for name in op.operands]
    no_numbers = any(kind in ("meta", "fake") for kind in (*kinds, *(strange.out if out else ())))
    no_numbers |= strange.context == "fake mode"

    def run(*tensors: Any) -> Any:
        return op(
            **dict(zip(op.operands, tensors, strict=True)), **call.attributes, **({"out": tuple(out)} if out else {})
        )

    try:
        results = CONTEXTS[strange.context](run, operands)
    except Exception as error:
        if not is_refusal(error):
            raise
        mixed = len({"wrap" if "wrap" in kind else kind for kind in kinds} & {"wrap", "subclass", "watching"}) > 1
        may = refused or out or no_numbers or mixed or strange.context not in OPEN or not set(kinds) <= PLAIN
        assert may, f"an ordinary call was refused: {error!r}"
        for kind, tensor, value in zip(strange.out, out, before, strict=False):
            if kind in ("plain", "negative", "strided", "imaginary") and len(out) == 1:
                content = value_of(tensor)
                assert content is not None and value is not None
                assert content.tobytes() == value.tobytes(), f"refused ({error}), but out was written"
        return True, 0
    results = results if isinstance(results, tuple) else (results,)
    assert not refused or no_numbers, f"not refused: {results}"
    compared = 0
    for name, result, wanted in zip(op.results, results, expected, strict=True):
        assert tuple(result.shape) == wanted.shape, f"{name} has shape {tuple(result.shape)}, not {wanted.shape}"
        compared += compare(name, result, wanted)
    for name, tensor, wanted in zip(op.results, out, expected, strict=False):
        compared += compare(f"out for {name}", tensor, wanted)
    if strange.backward:
        backward(strange, operands, results, values)
    return False, compared


def compare(name: str, result: Any, wanted: np.ndarray) -> int:
    return compare_values(name, value_of(result), wanted)


def compare_values(name: str, result: np.ndarray | None, wanted: np.ndarray) -> int:
    if result is None:
        return 0
    assert result.dtype == wanted.dtype, f"{name} is {result.dtype}, not {wanted.dtype}"
    if result.tobytes() != wanted.tobytes():
        fuzz.assert_same_bits(result, wanted, what=name)
    return wanted.size


def backward(strange: Call, operands: list[Any], results: Any, values: dict[str, np.ndarray]) -> None:
    """Gradients of some results only, twice, through tensors that are strange as well: as through plain ones."""
    if strange.backward in ("subclass", "wrapper") and {"subclass", "watching"} & set(strange.kinds.values()):
        return  # classes that do not know each other
    leaves = [t for t in operands if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    chosen = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not leaves or not chosen or strange.context not in ("eager", "twice"):
        return
    if not {strange.kinds[name] for name in strange.call.op.operands} <= PLAIN - {
        "wrapper",
        "wrapped negative",
        "ended level",
    }:
        return
    plain = [to_torch(array) for array in values.values()]
    for tensor, operand in zip(plain, operands, strict=True):
        tensor.requires_grad_(operand.requires_grad)
    again = strange.call.op(**dict(zip(strange.call.op.operands, plain, strict=True)), **strange.call.attributes)
    of_plain = [r for r in (again if isinstance(again, tuple) else (again,)) if r.requires_grad]
    arriving = [KINDS[strange.backward](np.ones(r.shape, to_numpy(r.detach()).dtype), strange.source) for r in of_plain]
    at = strange.source.integer(0, len(chosen) - 1)
    twice: list[Any] = []
    for outputs, inputs, gradient in (
        (chosen, leaves, arriving[at][0]),
        (
            of_plain,
            [p for p, t in zip(plain, operands, strict=True) if any(t is leaf for leaf in leaves)],
            to_torch(arriving[at][1]),
        ),
    ):
        try:
            first = torch.autograd.grad(outputs[at], inputs, gradient, create_graph=True, allow_unused=True)
            sums = [g.abs().sum() for g in first if g is not None and g.requires_grad]
            second = torch.autograd.grad(sum(sums), inputs, allow_unused=True) if sums else ()
        except ValueError as error:  # of a gradient operator, which looks at operands that the operator ignored
            twice.append(str(error))
            continue
        twice.append([*first, *second])
    if str in map(type, twice):
        assert twice[0] == twice[1], f"refused in one case only: {twice}"
        return
    for derivative, wanted in zip(*twice, strict=True):
        assert (derivative is None) == (wanted is None), f"the gradient is {derivative}, not {wanted}"
        if derivative is not None:
            derivative, wanted = value_of(derivative), value_of(wanted)
            if derivative is not None and "zero" in (strange.backward, *strange.kinds.values()):
                # Zeros that are nowhere in memory stay zeros in PyTorch's own products, by infinity too, and have no
                # sign.
                wanted = np.where((derivative == 0) & ((wanted == 0) | np.isnan(wanted)), derivative, wanted)
            compare_values("a gradient", derivative, wanted)


def main() -> int:
    return fuzz.main(sys.modules[__name__])


if __name__ == "__main__":
    sys.exit(main())
