# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors in, PyTorch tensors out: every declared operator as a `torch.ops.exactqat` operator with autograd.

Each operator is registered once: a schema derived from its declaration, CPU and GPU kernels, the shape rule for fake
tensors (`torch.compile`, `torch.export`), and its vjp, itself made of such operators, so that it can be differentiated
again.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from exactqat.operators import OPERATORS
from exactqat.operators.cpu import LARGE, Learned, Shortcut, block, kernels, planned, shortcut
from exactqat.operators.declarations.dispatch import arrays_in, framework_of, is_array_like
from exactqat.operators.declarations.memory import (
    Memory,
    check_out,
    check_out_specs,
    dtypes_that_fit,
    guest,
    out_is_not_dense,
    unreadable,
)
from exactqat.operators.declarations.op import Operator
from exactqat.operators.declarations.plain_numbers import FLOAT32_LIMIT
from exactqat.operators.declarations.specification import HALVES, ITEM_SIZES, Attributes, TensorSpec, Value

# What operators and functions of autograd are called as: with tensors, then attributes.
Result = torch.Tensor | tuple[torch.Tensor, ...]
Results = Callable[..., Result]

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "uint8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CPU = torch.device("cpu")
_LIBRARY = torch.library.Library("exactqat", "DEF")
_SCHEMA_TYPES = {"integers": "int[]", "choice": "str"}
_OVERLOADS: dict[str, Results] = {}
_DIFFERENTIABLE: dict[str, Results] = {}


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


# A plain eager call does not need PyTorch's dispatcher, which takes longer than the kernel for a small tensor. It does
# where any of these answers: modes (fake tensors among them), `torch.func`, tracing, tangents, a profiler that wants to
# see it.
_MODES = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
    _in_forward_mode,
)
_UNUSUAL = (*_MODES, torch.autograd._profiler_enabled)

# The dispatch keys of a tensor that is nothing but numbers in memory. All others have a meaning that only the
# dispatcher knows: a sign or zeros that are not in memory, a level of `torch.func`, another class' operators.
_PLAIN = 0
for _key in ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
    _PLAIN |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()

# Threads of our own would take turns with PyTorch's, which go on spinning after each of its operators.
kernels.share_threads("libtorch_cpu.so")


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), _NAMES.get(tensor.dtype) or _name(tensor.dtype))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but numbers in memory."""
    return torch._C._dispatch_keys(tensor).raw_repr() & ~_PLAIN == 0


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """What the dispatcher makes of a tensor before a kernel sees it, but not inside of a `__torch_dispatch__`."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def _check_memory(op: Operator, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage was freed or shrunk without its knowledge."""
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage()
    held = storage.nbytes() if storage.data_ptr() else 0
    if held < (last + 1) * tensor.element_size():
        raise ValueError(
            f"{op.name}: {name} of shape {list(tensor.shape)} must have memory, but its storage holds {held} bytes"
        )


def allocator(spec: TensorSpec) -> Callable[[], torch.Tensor]:
    """What makes a tensor for a result on the CPU."""
    dtype = _DTYPES[spec.dtype]
    bytes = spec.size * ITEM_SIZES[spec.dtype]
    if bytes < LARGE:
        strides = torch.empty(spec.shape, device="meta").stride()  # `empty` itself takes twice as long
        return partial(torch.empty_strided, spec.shape, strides, dtype=dtype, device=_CPU)
    return lambda: torch.frombuffer(block(bytes), dtype=dtype, count=spec.size).view(spec.shape)


def empty(shape: Sequence[int]) -> torch.Tensor:
    """A float32 tensor on the CPU in the memory that operators' results have, which is kept for the next one."""
    return allocator(TensorSpec(tuple(shape), "float32"))()


def _on_gpu(op: Operator, tensors: tuple[torch.Tensor, ...], attributes: Attributes) -> list[torch.Tensor]:
    """On the operands' device and PyTorch's current stream there; nothing waits for it."""
    from exactqat.operators import triton  # here, because a machine without a GPU need not have it

    dense = [tensor.contiguous() for tensor in tensors]
    lowered, plan = triton.planned(op, tuple([_spec(tensor) for tensor in dense]), attributes)
    device = dense[0].device
    buffers = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for spec in (*lowered.results, *plan.scratch)
    ]
    with torch.cuda.device(device):
        triton.run(plan, [*dense, *buffers])
    return buffers[: len(lowered.results)]


def _schema(op: Operator) -> str:
    """Operands first, then attributes, all positional and without defaults: callers always give them all."""
    parameters = [f"Tensor {name}" for name in op.operands]
    parameters += [f"{_SCHEMA_TYPES.get(kind, kind)} {name}" for name, kind in op.attributes.items()]
    results = ", ".join(["Tensor"] * len(op.results))
    return f"{op.name}({', '.join(parameters)}) -> {results if len(op.results) == 1 else f'({results})'}"


def _register(op: Operator) -> Results:
    count, names = len(op.operands), tuple(op.attributes)

    def split(arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], Attributes]:
        attributes = (tuple(v) if isinstance(v, list) else v for v in arguments[count:])
        return arguments[:count], tuple(zip(names, attributes, strict=True))

    def one_or_all(results: list[torch.Tensor]) -> Result:
        return results[0] if len(results) == 1 else tuple(results)

    def on_cpu(*arguments: Any) -> Result:
        try:
            results = _below_autograd(op)(arguments, {})
        except ValueError as error:
            raise op.refusal(error, arguments[:count], dict(zip(names, arguments[count:], strict=True))) from None
        if results is not None:
            return results
        tensors, attributes = split(arguments)
        tensors = tuple([tensor if is_plain(tensor) else _resolved(tensor) for tensor in tensors])
        for name, tensor in zip(op.operands, tensors, strict=True):
            _check_memory(op, name, tensor)
        dense = [tensor.contiguous() for tensor in tensors]
        lowered, plan = planned(op, tuple([_spec(tensor) for tensor in dense]), attributes)
        results = [allocator(spec)() for spec in lowered.results]
        try:
            plan(*[tensor.data_ptr() for tensor in (*dense, *results)])
        except ValueError as error:
            raise op.refusal(error, dense, dict(attributes)) from None
        return one_or_all(results)

    def on_cuda(*arguments: Any) -> Result:
        return one_or_all(_on_gpu(op, *split(arguments)))

    def on_fake(*arguments: Any) -> Result:
        tensors, attributes = split(arguments)
        # Not `op.lower`: sizes may be symbols, which cannot be remembered.
        lowered = op.check(tuple([_spec(tensor) for tensor in tensors]), attributes)
        device = tensors[0].device
        return one_or_all([torch.empty(s.shape, dtype=_DTYPES[s.dtype], device=device) for s in lowered.results])

    _LIBRARY.define(_schema(op), tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.exactqat, op.name).default
    _LIBRARY.impl(op.name, on_cpu, "CPU")
    _LIBRARY.impl(op.name, on_cuda, "CUDA")
    torch.library.register_fake(f"exactqat::{op.name}", on_fake, lib=_LIBRARY)
    if op.vjp is not None:
        _register_gradient(op, overload)
    else:
        _register_constant(op, overload)
    return overload


def _register_gradient(op: Operator, overload: Results) -> None:
    form = op.training_form
    form_overload = overload if form is op else _overload(form)
    constants = [i for i, name in enumerate(op.results) if name not in op.differentiable]
    count, own, names = len(op.operands), len(op.results), tuple(op.attributes)
    no_gradients = (None,) * len(names)
    always = [i for i, name in enumerate(op.operands) if name in op.keeps]
    conditions = {op.operands.index(name): (names.index(at), value) for name, (at, value) in op.keeps_if.items()}

    def kept(attributes: tuple[Value, ...]) -> list[int]:
        if not conditions:
            return always
        return [i for i in always if i not in conditions or attributes[conditions[i][0]] == conditions[i][1]]

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Result:
            results = _below_autograd(form)(arguments, {})
            if results is None:
                results = _below(form_overload, arguments)
            every = results if isinstance(results, tuple) else (results,)
            ctx.attributes = arguments[count:]
            ctx.save_for_backward(*[arguments[i] for i in kept(ctx.attributes)], *every[op.saved_results])
            if constants:
                ctx.mark_non_differentiable(*[every[i] for i in constants])
            return every[0] if own == 1 else tuple(every[:own])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            saved, present = ctx.saved_tensors, kept(ctx.attributes)
            operands: list[torch.Tensor | None] = [None] * count
            for i, tensor in zip(present, saved, strict=False):
                operands[i] = tensor
            assert op.vjp is not None
            attributes = dict(zip(names, ctx.attributes, strict=True))
            # Dense, so that the kernel can be called at once.
            arriving = [gradient.contiguous() for gradient in gradients[: op.gradient_count]]
            answer = op.vjp(arriving, operands, saved[len(present) :], attributes)
            return *answer, *no_gradients

    Differentiable.__name__ = Differentiable.__qualname__ = op.name
    apply = _DIFFERENTIABLE[op.name] = cast(Any, Differentiable).apply

    def with_gradient(*arguments: Any) -> Result:
        if _in_forward_mode():
            primals, tangents = _unpack(arguments[:count])
            if any(tangent is not None for tangent in tangents):
                return _forward(op, form_overload, primals, tangents, arguments[count:])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:count]):
            return _applied(apply, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    _LIBRARY.impl(op.name, with_gradient, "Autograd")


def _below(overload: Results, arguments: tuple[Any, ...]) -> Result:
    """What a function of autograd computes from below."""
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._functorch.peek_interpreter_stack() is None:
            return overload(*arguments)
        # Gradients are off in such a function, but further levels of `torch.func` may wait for theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return overload(*arguments)


def _applied(apply: Results, arguments: tuple[Any, ...]) -> Result:
    """A function of autograd, from below the dispatcher."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return apply(*arguments)
    # The dispatcher brings one level of `torch.func` after another here, each with its own tensors, as it does for
    # PyTorch's own operators.
    with enable_single_level_autograd_function():
        return apply(*arguments)


def _register_constant(op: Operator, overload: Results) -> None:
    """For an operator without a gradient: requesting one must not silently give zero."""
    count = len(op.operands)

    def refuse(tensors: Sequence[torch.Tensor | None]) -> None:
        if any(tensor is not None for tensor in tensors):
            raise NotImplementedError(f"{op.name} has no gradient")

    class Constant(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Result:
            ctx.set_materialize_grads(False)
            return _below(overload, arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            refuse(gradients)
            return (None,) * (count + len(op.attributes))

    Constant.__name__ = Constant.__qualname__ = op.name
    apply = cast(Any, Constant).apply

    def without_gradient(*arguments: Any) -> Result:
        if _in_forward_mode():
            refuse(_unpack(arguments[:count])[1])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:count]):
            return _applied(apply, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    _LIBRARY.impl(op.name, without_gradient, "Autograd")


def _unpack(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    pairs = [forward_ad.unpack_dual(tensor) for tensor in tensors]
    return [pair.primal for pair in pairs], [pair.tangent for pair in pairs]


def _forward(
    op: Operator,
    form: Results,
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
    attributes: tuple[Value, ...],
) -> Result:
    """Results with their tangents, in forward mode.

    A vjp is linear in the gradients it is given, so its own gradient with respect to them, with the tangents in the
    place of its results' gradients, is the product of Jacobian and tangents. No operator has to say more.
    """
    assert op.vjp is not None
    differentiated = torch.is_grad_enabled()
    results = form(*primals, *attributes)
    every = results if isinstance(results, tuple) else (results,)
    operands = [tensor if name in op.keeps else None for name, tensor in zip(op.operands, primals, strict=True)]
    with torch.inference_mode(False), torch.enable_grad():
        gradients = [torch.zeros_like(result, requires_grad=True) for result in every[: op.gradient_count]]
        answer = op.vjp(gradients, operands, every[op.saved_results], dict(zip(op.attributes, attributes, strict=True)))
        pulled, directions = [], []
        for gradient, tangent in zip(answer, tangents, strict=True):
            if gradient is not None and tangent is not None:
                pulled.append(gradient)
                directions.append(tangent.to(gradient.dtype))
        pushed: Sequence[torch.Tensor | None] = ()
        if pulled:
            pushed = torch.autograd.grad(pulled, gradients, directions, create_graph=differentiated, allow_unused=True)
    answers = list(every[: len(op.results)])
    for i, tangent in enumerate(pushed):
        if tangent is not None and op.results[i] in op.differentiable:
            answers[i] = forward_ad.make_dual(answers[i], tangent.clone())  # it may be the tangent that was given
    return answers[0] if len(answers) == 1 else tuple(answers)


def _overload(op: Operator) -> Results:
    if op.name not in _OVERLOADS:
        _OVERLOADS[op.name] = _register(op)
    return _OVERLOADS[op.name]


for _op in OPERATORS.values():
    _overload(_op)


def _learn(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Learned:
    """For `shortcut`."""
    operands, attributes = op.bind(args, kwargs)
    specs = tuple([_spec(tensor) for tensor in _tensors(op, operands)])
    if any(spec.dtype in HALVES and not framework_of(v) for spec, v in zip(specs, operands, strict=True)):
        raise TypeError("shortcuts write numbers as float32 or float64")
    lowered, plan = planned(op, specs, tuple(attributes.items()))
    templates = [spec if isinstance(value, torch.Tensor) else None for spec, value in zip(specs, operands, strict=True)]
    results = [  # `like` is the quicker way, but knows nothing of blocks
        templates.index(spec) if spec in templates and spec.size * ITEM_SIZES[spec.dtype] < LARGE else allocator(spec)
        for spec in lowered.results
    ]
    return plan, results, tuple(attributes.values())


def _shortcut(op: Operator, **autograd: Any) -> Shortcut:
    return shortcut(
        op,
        (torch.Tensor, torch.nn.Parameter),
        partial(_learn, op),
        unusual=_UNUSUAL,
        exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # from PyTorch 2.10 on
        to_dlpack=torch.utils.dlpack.to_dlpack,
        is_negated=torch.Tensor.is_neg,  # quicker than the function
        offset=torch.Tensor.storage_offset,
        storage=torch.Tensor.untyped_storage,
        bytes=torch.UntypedStorage.nbytes,
        like=torch.empty_like,
        is_inference=torch.is_inference,
        written=torch.autograd.graph.increment_version,
        **autograd,
    )


def _below_autograd(op: Operator) -> Shortcut:
    route = op.shortcuts.get("below autograd")
    if route is None:
        route = op.shortcuts["below autograd"] = _shortcut(op)
    return route


def _install_shortcut(op: Operator) -> None:
    if torch.Tensor not in op.shortcuts:
        route = _shortcut(op, is_grad_enabled=torch.is_grad_enabled, differentiable=_DIFFERENTIABLE.get(op.name))
        op.shortcuts[torch.Tensor] = op.shortcuts[torch.nn.Parameter] = route


def _memory(tensor: torch.Tensor) -> Memory:
    return Memory(_spec(tensor), tensor.data_ptr(), tensor.is_contiguous(), not tensor.is_inference())


def _into(op: Operator, tensors: list[torch.Tensor], attributes: Attributes, out: tuple[Any, ...]) -> Any:
    """Run on the CPU into existing tensors, outside of autograd, as PyTorch's own out= does."""
    if torch.compiler.is_compiling():
        raise TypeError(f"{op.name}: out cannot be used under torch.compile, which plans memory itself")
    if any(tensor is None for tensor in out):
        lowered = op.check(tuple([_spec(tensor) for tensor in tensors]), attributes)
        out = tuple([allocator(s)() if t is None else t for s, t in zip(lowered.results, out, strict=True)])
    for tensor in out:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise TypeError(f"out must be PyTorch tensors on the CPU like the operands, got {type(tensor).__name__}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *out)):
        raise ValueError(f"{op.name}: out cannot be used with tensors that require grad; use torch.no_grad()")
    if _in_forward_mode() and any(tangent is not None for tangent in _unpack((*tensors, *out))[1]):
        raise ValueError(f"{op.name}: out cannot be used in forward mode with tensors that have tangents")
    names = (*op.operands, *[f"out for {name}" for name in op.results])
    plain = [(name, tensor) for name, tensor in zip(names, (*tensors, *out), strict=True) if is_plain(tensor)]
    for name, tensor in plain:
        _check_memory(op, name, tensor)
    if len(plain) < len(names):
        return _copied_into(op, tensors, attributes, out)
    if any(mode() for mode in _MODES):
        for name, place in zip(op.results, out, strict=True):
            if not place.is_contiguous():  # refused by who watches nothing, and a trace is called both ways
                raise out_is_not_dense(op, name)
        return _copied_into(op, tensors, attributes, out)
    dense = [tensor.contiguous() for tensor in tensors]
    lowered, plan = planned(op, tuple([_spec(tensor) for tensor in dense]), attributes)
    check_out(op, lowered, [_memory(tensor) for tensor in dense], [_memory(tensor) for tensor in out])
    try:
        plan(*[tensor.data_ptr() for tensor in (*dense, *out)])
    except ValueError as error:
        raise op.refusal(error, dense, dict(attributes)) from None
    torch.autograd.graph.increment_version(out)
    _install_shortcut(op)
    return op.wrap(out)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements may share their memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def _copied_into(op: Operator, tensors: list[torch.Tensor], attributes: Attributes, out: tuple[Any, ...]) -> Any:
    """For tensors that are more than memory, and where somebody watches: what PyTorch does with them is for it to
    say."""
    for name, place in zip(op.results, out, strict=True):
        if place.layout != torch.strided or place.is_nested:
            raise ValueError(f"{op.name}: out for {name} must be a dense tensor, got layout {place.layout}")
        if place._is_zerotensor() or (place.is_inference() and not torch.is_inference_mode_enabled()):
            raise ValueError(f"{op.name}: out for {name} must be writable, got a tensor that never changes")
        if _overlaps_itself(place):
            raise ValueError(
                f"{op.name}: out for {name} must have separate memory for each element, got strides {place.stride()}"
            )
    lowered = op.check(tuple([_spec(tensor) for tensor in tensors]), attributes)
    check_out_specs(op, lowered, [_spec(place) for place in out])
    results = _overload(op)(*tensors, *[value for _, value in attributes])
    for name, place, result in zip(op.results, out, results if isinstance(results, tuple) else (results,), strict=True):
        try:
            place.copy_(result)
        except AssertionError as error:  # how fake tensors refuse real ones, and those of another mode
            kinds = f"{type(place).__name__} for operands that give {type(result).__name__}"
            raise TypeError(f"{op.name}: out for {name} must be a tensor like the operands, got {kinds}") from error
    return op.wrap(out)


def _first_tensor(values: Sequence[object]) -> torch.Tensor | None:
    """The first tensor, or, where there is none, the first within a list."""
    tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
    for value in values if tensor is None else ():
        if tensor is None and isinstance(value, list | tuple):
            tensor = _first_tensor(value)
    return tensor


def _tensors(op: Operator, operands: list[Any]) -> list[torch.Tensor]:
    """All others become what goes with the tensors: ranges at least float32, data like the data."""
    if not [value for value in operands if not isinstance(value, torch.Tensor)]:
        return operands
    like = _first_tensor(operands)
    assert like is not None
    device = like.device
    kept = [_name(value.dtype) if isinstance(value, torch.Tensor) else None for value in operands]
    fitting = dtypes_that_fit(op, kept, "float64" if [d for d in kept if d][:1] == ["float64"] else "float32")

    def tensor(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(value, int | float):  # filled on the device: a copy to a GPU could wait for it
            if dtype == torch.float32 and abs(value) >= FLOAT32_LIMIT:  # which PyTorch refuses, others round
                value = math.copysign(math.inf, value)
            return torch.full((), float(value), dtype=dtype, device=device)
        if isinstance(value, list | tuple) and arrays_in(value):
            return torch.stack([tensor(name, v, dtype) for v in value])  # which hands on gradients
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        if is_array_like(value) and not torch.compiler.is_compiling():
            value = guest(op, name, np.asarray(value))
            if value.dtype.kind != "f":  # not all of them are PyTorch's
                value = value.astype(np.float64)
        return torch.as_tensor(value, dtype=dtype, device=device)

    tensors = []
    for name, value, wanted in zip(op.operands, operands, fitting, strict=True):
        if not isinstance(value, torch.Tensor):
            try:
                value = tensor(name, value, _DTYPES[wanted])
            except (ValueError, TypeError, RuntimeError) as error:
                raise unreadable(op, name, error) from None
        tensors.append(value)
    return tensors


def declared(name: str) -> Operator:
    """An operator by its name, also one of the kit's own, which do several steps of training in one pass on the CPU."""
    return OPERATORS[name]


def kernel(
    op: Operator, operands: Sequence[tuple[str, Sequence[int]]], **attributes: Value
) -> tuple[Callable[..., None], list[Callable[[], torch.Tensor]]]:
    """For callers whose tensors are plain, dense and on the CPU, and who see to it that they stay: what computes at the
    addresses of operands and results, and for each result what allocates it.

    Args:
        operands: dtype and shape of each.
        attributes: all of them.

    Raises:
        ValueError, TypeError: as the operator.
    """
    specs = tuple([TensorSpec(tuple(shape), dtype) for dtype, shape in operands])
    lowered, plan = planned(op, specs, tuple([(name, attributes[name]) for name in op.attributes]))
    return plan, [allocator(spec) for spec in lowered.results]


# Moves a range that follows the data, at addresses (moved_range.h).
move_range = kernels.move_range


def row_magnitudes(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitudes of the rows of several weights, [rows of the first one + ...], NaN for a row with NaN.

    weights: plain float32 on the CPU, each row in one piece.
    """
    magnitudes = torch.empty(sum(len(weight) for weight in weights))
    places = [(weight.data_ptr(), len(weight), weight.numel() // max(len(weight), 1)) for weight in weights]
    kernels.row_magnitudes(places, magnitudes.data_ptr())
    return magnitudes


def call(
    op: Operator, operands: list[Any], attributes: dict[str, Value], out: tuple[torch.Tensor | None, ...] | None = None
) -> Any:
    """Run `op` on PyTorch tensors."""
    tensors = _tensors(op, operands)
    like = next((value for value in operands if isinstance(value, torch.Tensor)), tensors[0])
    for name, tensor in zip(op.operands, tensors, strict=True):
        if tensor.device != like.device:
            raise ValueError(f"{op.name}: {name} is on device {tensor.device}, but other operands are on {like.device}")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
            raise TypeError(f"{op.name}: {name} must be a dense tensor, got a {kind} one")
    if out is not None:
        return _into(op, tensors, tuple(attributes.items()), out)
    if torch.compiler.is_compiling():
        # While PyTorch traces, an error from inside an operator would come out as a RuntimeError; here it stays what
        # it is.
        op.check(tuple([_spec(tensor) for tensor in tensors]), tuple(attributes.items()))
    else:
        _install_shortcut(op)  # for the next call
    results = _overload(op)(*tensors, *attributes.values())
    return op.wrap(results if isinstance(results, tuple) else (results,))


class _PassThrough(torch.autograd.Function):
    """Takes the place of `value` in the forward pass and of the identity on `array` in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(array: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: object, tangent: torch.Tensor, _: object) -> torch.Tensor:
        return tangent.clone()


def pass_through(function: Callable[..., Any], arrays: tuple[torch.Tensor, ...]) -> Any:
    """`function(*arrays)`, through which gradients pass unchanged, output by output."""
    with torch.no_grad():
        results = function(*arrays)
    if isinstance(results, torch.Tensor):
        return _PassThrough.apply(arrays[0], results)
    return type(results)(_PassThrough.apply(a, r) for a, r in zip(arrays, results, strict=True))
