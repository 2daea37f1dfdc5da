# SPDX-License-Identifier: Apache-2.0
"""How each framework makes the calls that are timed. Runs in worker.py's processes, one for each framework.

A backend's `calls` makes the operands and returns the contestants, functions without arguments that return when the
result is there. Names say the layout where there is a choice, since users have it: each peer is compared in its best
one. Results are freshly allocated; exactqat's also written into existing ones. On a GPU contestants are rotations of
card.py, over `sets` sets of operands, and exactqat's two are its calls and the replays of them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import card
import numpy as np
import timing
from operations import make

Calls = dict[str, Callable[[], Any]]
Variants = dict[str, dict[str, Any]]  # by data format: descriptions of operands, and attributes

# What `small_calls` computes with: the overhead of a call is its time with next to nothing to do.
SMALL = np.linspace(-2, 2, 8, dtype=np.float32)
LOW, HIGH = np.float32(-1.5), np.float32(1.5)


def _arrays(variant: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: make(description) for name, description in variant["operands"].items()}


def _tensors(torch: Any, arrays: dict[str, np.ndarray], device: str) -> dict[str, Any]:
    """The arrays' own memory on the CPU, new memory at each call elsewhere."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _check_device(device: str, *allowed: str) -> None:
    if device not in allowed:
        raise ValueError(f"device must be {' or '.join(allowed)}, got {device!r}")


class ExactQat:
    """This library's kernels on NumPy arrays; on a GPU, on PyTorch's tensors."""

    busy: Callable[[], Any] | None = None  # its threads sleep between calls

    def __init__(self, threads: int, device: str) -> None:
        _check_device(device, "cpu", "cuda")
        import exactqat

        exactqat.set_num_threads(threads)
        self.module, self.device = exactqat, device
        self.versions = {"exactqat": exactqat.__version__, "numpy": np.__version__}

    def _rotations(self, raw: str, variants: Variants, sets: int) -> Calls:
        import torch

        operator = getattr(self.module.raw_ops, raw)
        calls: Calls = {}
        for data_format, variant in variants.items():
            arrays = _arrays(variant)
            operands = [_tensors(torch, arrays, self.device) for _ in range(sets)]
            one_for_each = [partial(operator, **tensors, **variant["attributes"]) for tensors in operands]
            calls[f"preallocated {data_format}".strip()] = card.replayed(torch, one_for_each)
            calls[f"fresh {data_format}".strip()] = card.called(torch, one_for_each)
        return calls

    def calls(self, raw: str, variants: Variants, sets: int = 1, **unused: Any) -> Calls:
        if self.device != "cpu":
            return self._rotations(raw, variants, sets)
        operator = getattr(self.module.raw_ops, raw)
        calls: Calls = {}
        for data_format, variant in variants.items():
            arguments = _arrays(variant) | variant["attributes"]
            results = operator(**arguments)
            out = tuple(np.empty_like(r) for r in (results if isinstance(results, tuple) else (results,)))
            del results

            def fresh(arguments: dict[str, Any] = arguments) -> Any:
                return operator(**arguments)

            def preallocated(arguments: dict[str, Any] = arguments, out: Any = out) -> Any:
                return operator(**arguments, out=out)

            calls[f"preallocated {data_format}".strip()] = preallocated
            calls[f"fresh {data_format}".strip()] = fresh
        return calls

    def small_calls(self) -> Calls:
        eq, x = self.module, SMALL
        low, high, g = np.array(LOW), np.array(HIGH), np.ones_like(SMALL)

        def both() -> None:
            eq.fake_quant_with_min_max_vars(x, low, high)
            eq.fake_quant_with_min_max_vars_gradient(g, x, low, high)

        return {
            "exactqat, NumPy|forward": lambda: eq.fake_quant_with_min_max_vars(x, low, high),
            "exactqat, NumPy|forward and gradient": both,
        }


class TensorFlow:
    """TensorFlow's raw operators, eagerly.

    Its calls may return before the kernel has ended, so the first result is asked for its memory, which waits; that is
    what `.numpy()` does, without the copy that it makes on top.
    """

    busy: Callable[[], Any] | None = None

    def __init__(self, threads: int, device: str) -> None:
        _check_device(device, "cpu")
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        self.module = tensorflow
        self.versions = {"tensorflow": tensorflow.__version__}
        x = tensorflow.zeros(1 << 22)
        self.busy = lambda: (x + x)._numpy()

    def calls(self, raw: str, variants: Variants, **unused: Any) -> Calls:
        operator = getattr(self.module.raw_ops, raw)
        # Its CPU kernels have one layout.
        variant = variants.get("NHWC") or variants.get("")
        if variant is None:
            return {}
        operands = {name: self.module.constant(array) for name, array in _arrays(variant).items()}
        arguments = operands | variant["attributes"]

        def call() -> Any:
            results = operator(**arguments)
            return (results[0] if isinstance(results, tuple) else results)._numpy()

        return {"TensorFlow": call}

    def small_calls(self) -> Calls:
        tf = self.module
        x, low, high = (tf.constant(value) for value in (SMALL, LOW, HIGH))
        operator = tf.quantization.fake_quant_with_min_max_vars

        def both() -> Any:
            with tf.GradientTape() as tape:
                tape.watch((x, low, high))
                y = operator(x, low, high)
            return tape.gradient(y, (x, low, high))[0]._numpy()

        return {
            "TensorFlow|forward": lambda: operator(x, low, high)._numpy(),
            "TensorFlow|forward and backward": both,
        }


class Jax:
    """`jax.jit` of the plain formulas, and of XLA's own convolution for depthwise layers."""

    busy: Callable[[], Any] | None = None

    def __init__(self, threads: int, device: str) -> None:
        _check_device(device, "cpu", "cuda")
        import jax

        self.module, self.device = jax, device
        self.versions = {"jax": jax.__version__}
        if device != "cpu":
            jax.config.update("jax_default_matmul_precision", "highest")  # no TF32 in convolutions
        x = jax.numpy.zeros(1 << 22)
        double = jax.jit(lambda x: x + x)
        self.busy = lambda: double(x).block_until_ready()

    def calls(self, key: str, variants: Variants, formats: list[str], sets: int = 1, **unused: Any) -> Calls:
        calls: Calls = {}
        for data_format in formats:
            variant, name = variants[data_format], f"jax.jit {data_format}".strip()
            operands = _arrays(variant)
            every = [{name: self.module.numpy.asarray(array) for name, array in operands.items()} for _ in range(sets)]
            compiled = self.module.jit(self._function(key, every[0], variant["attributes"]))
            if self.device != "cpu":
                rotation = [partial(compiled, arrays) for arrays in every]
                calls[name] = card.by_host(rotation, self.module.block_until_ready)
                continue

            def call(compiled: Any = compiled, arrays: dict[str, Any] = every[0]) -> Any:
                return self.module.block_until_ready(compiled(arrays))

            calls[name] = call
        return calls

    def _function(self, key: str, arrays: dict[str, Any], attributes: dict[str, Any]) -> Callable[[Any], Any]:
        import formulas

        if not key.startswith("depthwise"):
            plain = getattr(formulas, key)
            return lambda arrays: plain(self.module.numpy, **arrays, **attributes)
        data_format, strides = attributes["data_format"], attributes["strides"]
        steps = strides[1:3] if data_format == "NHWC" else strides[2:4]

        def convolution(image: Any, filter: Any) -> Any:
            height, width, channels, multiplier = filter.shape
            return self.module.lax.conv_general_dilated(
                image,
                filter.reshape(height, width, 1, channels * multiplier),
                steps,
                "SAME",
                dimension_numbers=(data_format, "HWIO", data_format),
                feature_group_count=channels,
            )

        def gradient(arrays: dict[str, Any]) -> Any:
            if "input_sizes" in attributes:
                nothing = self.module.ShapeDtypeStruct(tuple(attributes["input_sizes"]), np.float32)
                transposed = self.module.linear_transpose(lambda image: convolution(image, arrays["filter"]), nothing)
            else:
                nothing = self.module.ShapeDtypeStruct(tuple(attributes["filter_sizes"]), np.float32)
                transposed = self.module.linear_transpose(lambda filter: convolution(arrays["input"], filter), nothing)
            return transposed(arrays["out_backprop"])[0]

        return gradient if "out_backprop" in arrays else lambda arrays: convolution(arrays["input"], arrays["filter"])

    def small_calls(self) -> Calls:
        import formulas

        import exactqat as eq

        jax, jnp = self.module, self.module.numpy
        operands = tuple(jnp.asarray(value) for value in (SMALL, LOW, HIGH))

        def ours(x: Any, low: Any, high: Any) -> Any:
            return eq.fake_quant_with_min_max_vars(x, low, high)

        def plain(x: Any, low: Any, high: Any) -> Any:
            return formulas.vars(jnp, x, low, high, num_bits=8, narrow_range=False)

        calls: Calls = {"exactqat, JAX|forward": lambda: jax.block_until_ready(ours(*operands))}
        for who, function in (("exactqat, jax.jit", ours), ("jax.jit of the formula", plain)):
            forward = jax.jit(function)
            both = jax.jit(jax.value_and_grad(lambda *a, f=function: f(*a).sum(), argnums=(0, 1, 2)))
            calls[f"{who}|forward"] = lambda forward=forward: jax.block_until_ready(forward(*operands))  # type: ignore[misc]
            calls[f"{who}|forward and backward"] = lambda both=both: jax.block_until_ready(both(*operands))  # type: ignore[misc]
        return calls


class Torch:
    """PyTorch's own operators, eagerly, in its two layouts; `torch.compile` of the plain formulas; and the copy.

    What is compared: fixed ranges and quantize-and-dequantize are `fake_quantize_per_tensor_affine`, with one range
    or one for each channel; trained ranges' gradients are the backward passes of the learnable fake quantization, the
    others those of the cached mask (the mask was made before); where PyTorch has no operator, the formula runs eagerly.
    On a GPU batch norm has two operators, PyTorch's own and cuDNN's.
    """

    busy: Callable[[], Any] | None = None

    def __init__(self, threads: int, device: str) -> None:
        _check_device(device, "cpu", "cuda")
        cores = os.sched_getaffinity(0)  # importing PyTorch may bind this thread to one of them, and its children
        import torch

        torch.set_num_threads(threads)
        self.module, self.threads, self.device = torch, threads, device
        self.left_out: list[str] = []
        if device != "cpu":
            card.prepare(torch)
        self.aten = torch.ops.aten
        self.pool = ThreadPoolExecutor(threads, initializer=os.sched_setaffinity, initargs=(0, cores))
        self.versions = {"torch": torch.__version__}
        x = torch.zeros(1 << 22)
        self.busy = lambda: x + x

    def peak(self) -> float:
        """Multiply-adds in a second of a large matrix product, the most that a real kernel reaches."""
        size = 1536 if self.device == "cpu" else 8192
        with self.module.device(self.device):
            left, right = self.module.ones(size, size), self.module.ones(size, size)

        def product() -> Any:
            return left @ right

        if self.device == "cpu":
            return size**3 / min(timing.turn(product) for _ in range(9))
        rotation = card.replayed(self.module, [product])
        return size**3 / min(rotation.turn() for _ in range(9))

    def calls(
        self,
        key: str,
        variants: Variants,
        copied: int,
        eager: bool,
        formats: list[str],
        sets: int = 1,
        **unused: Any,
    ) -> Calls:
        """copied: bytes that a copy should move, half of them read; formats: those in which formulas are compiled."""
        arrays = {data_format: _arrays(variant) for data_format, variant in variants.items()}
        if formats:
            self.module._dynamo.reset()
        compiled = {data_format: self._compiled(key, variants[data_format]["attributes"]) for data_format in formats}

        def of_one_set() -> Calls:
            calls = self._copies(copied) if copied else {}
            operands = {data_format: _tensors(self.module, data, self.device) for data_format, data in arrays.items()}
            if eager:
                for data_format, variant in variants.items():
                    calls |= self._eager(key, data_format, operands[data_format], variant["attributes"])
            for data_format, function in compiled.items():
                calls[f"torch.compile {data_format}".strip()] = partial(function, operands[data_format])
            return calls

        with self.module.device(self.device):  # for what the contestants make beside the operands
            every = [of_one_set() for _ in range(sets)]
        return every[0] if self.device == "cpu" else self._rotations(every)

    def _rotations(self, every: list[Calls]) -> Calls:
        self.left_out = []
        calls: Calls = {}
        for name in every[0]:
            try:
                calls[name] = card.replayed(self.module, [of_set[name] for of_set in every])
            except Exception as error:  # one that a GPU does not have must not take the copy with it
                self.left_out.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:200])
        return calls

    def _copies(self, moved: int) -> Calls:
        """Two ways to copy between existing buffers; the faster one is the bandwidth there is.

        memcpy first: PyTorch's threads, which stay busy after its calls, would hinder it.
        """
        torch = self.module
        source, target = torch.ones(max(moved // 8, 1)), torch.empty(max(moved // 8, 1))
        by_torch: Calls = {"copy, PyTorch": lambda: target.copy_(source)}
        if moved < 1 << 23 or self.device != "cpu":  # less is not worth the way to Python's threads
            return by_torch
        size = source.numel() * 4
        bounds = [size * i // self.threads // 64 * 64 for i in range(self.threads)] + [size]
        pieces = [
            (target.data_ptr() + start, source.data_ptr() + start, end - start)
            for start, end in itertools.pairwise(bounds)
        ]

        def memcpy() -> Any:
            waiting = [self.pool.submit(ctypes.memmove, *piece) for piece in pieces[1:]]
            ctypes.memmove(*pieces[0])
            return [future.result() for future in waiting], source, target

        return {"copy, memcpy": memcpy} | by_torch

    def _eager(self, key: str, data_format: str, operands: dict[str, Any], attributes: dict[str, Any]) -> Calls:
        torch, aten = self.module, self.aten
        calls: Calls = {}

        def images(*names: str) -> list[tuple[str, list[Any]]]:
            """As PyTorch's users have them: `NCHW`, or the memory of NHWC as `channels_last`."""
            last = [operands[name].permute(0, 3, 1, 2) for name in names]
            return [("channels_last", last), ("NCHW", [tensor.contiguous() for tensor in last])]

        if key in ("args", "args_gradient"):
            scale, zero = _affine(attributes["min"], attributes["max"])
            x = operands["inputs"]
            if key == "args":
                calls["PyTorch"] = lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)
            else:
                mask = aten.fake_quantize_per_tensor_affine_cachemask(x, scale, zero, 0, 255)[1]
                g = operands["gradients"]
                calls["PyTorch"] = lambda: aten.fake_quantize_per_tensor_affine_cachemask_backward(g, mask)
        elif key in ("vars", "vars_gradient"):
            scale, zero = _affine(operands["min"].item(), operands["max"].item())
            x, scales = operands["inputs"], torch.tensor([scale])
            integer, learned = torch.tensor([zero], dtype=torch.int32), torch.tensor([float(zero)])
            if key == "vars":
                calls["PyTorch"] = lambda: torch.fake_quantize_per_tensor_affine(x, scales, integer, 0, 255)
            else:
                g, backward = operands["gradients"], aten._fake_quantize_learnable_per_tensor_affine_backward
                calls["PyTorch"] = lambda: backward(g, x, scales, learned, 0, 255)
        elif key in ("per_channel", "per_channel_gradient"):
            bounds = zip(operands["min"].tolist(), operands["max"].tolist(), strict=True)
            pairs = [_affine(low, high) for low, high in bounds]
            scales = torch.tensor([scale for scale, _ in pairs])
            zeros = torch.tensor([zero for _, zero in pairs], dtype=torch.int32)
            learned = zeros.float()
            if key == "per_channel":
                for layout, (x,) in images("inputs"):
                    calls[f"PyTorch {layout}"] = lambda x=x: torch.fake_quantize_per_channel_affine(
                        x, scales, zeros, 1, 0, 255
                    )
            else:
                backward = aten._fake_quantize_learnable_per_channel_affine_backward
                for layout, (g, x) in images("gradients", "inputs"):
                    calls[f"PyTorch {layout}"] = lambda g=g, x=x: backward(g, x, scales, learned, 1, 0, 255)
        elif key == "dequantize":
            scales = torch.maximum(operands["input_min"] / -128, operands["input_max"] / 127).reshape(1)
            x, zero = operands["input"], torch.zeros(1, dtype=torch.int32)
            calls["PyTorch"] = lambda: torch.fake_quantize_per_tensor_affine(x, scales, zero, -128, 127)
        elif key == "dequantize_from_data":
            x, zero = operands["input"], torch.zeros(1, dtype=torch.int32)

            def from_data() -> Any:
                low, high = torch.aminmax(x)
                scale = torch.maximum(low / -128, high / 127).reshape(1)
                return torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)

            calls["PyTorch"] = from_data
        elif key == "dequantize_axis":
            zeros = torch.zeros(operands["input"].shape[3], dtype=torch.int32)

            def from_channels(x: Any) -> Any:
                low, high = torch.amin(x, (0, 2, 3)), torch.amax(x, (0, 2, 3))
                return torch.fake_quantize_per_channel_affine(
                    x, torch.maximum(low / -128, high / 127), zeros, 1, -128, 127
                )

            for layout, (x,) in images("input"):
                calls[f"PyTorch {layout}"] = lambda x=x: from_channels(x)
        elif key == "dequantize_gradient":
            import formulas

            calls["PyTorch"] = lambda: formulas.dequantize_gradient(torch, **operands)
        elif key in ("batch_norm", "batch_norm_gradient"):
            calls = self._batch_norm(key, data_format, operands, attributes)
        else:
            calls = self._depthwise(key, data_format, operands, attributes)
        return calls

    def _image(self, data_format: str, tensor: Any) -> Any:
        """Channels before height and width, whatever the memory."""
        return tensor if data_format == "NCHW" else tensor.permute(0, 3, 1, 2)

    def _batch_norm(self, key: str, data_format: str, operands: dict[str, Any], attributes: dict[str, Any]) -> Calls:
        aten, epsilon = self.aten, attributes["epsilon"]
        x, scale = self._image(data_format, operands["x"]), operands["scale"]
        name = f"PyTorch {'NCHW' if data_format == 'NCHW' else 'channels_last'}"
        if key == "batch_norm":
            offset = operands["offset"]
            calls: Calls = {name: lambda: aten.native_batch_norm(x, scale, offset, None, None, True, 0.1, epsilon)}
            if self.device != "cpu":
                calls[f"{name} cuDNN"] = lambda: aten.cudnn_batch_norm(x, scale, offset, None, None, True, 0.1, epsilon)
            return calls
        g, mean = self._image(data_format, operands["y_backprop"]), operands["reserve_space_1"]
        inverse = (operands["reserve_space_2"] + epsilon).rsqrt()
        calls = {
            name: lambda: aten.native_batch_norm_backward(
                g, x, scale, None, None, mean, inverse, True, epsilon, [True, True, True]
            )
        }
        if self.device != "cpu":
            nothing = self.module.zeros_like(scale)

            @cache  # made by the first call, which is not timed
            def kept() -> Any:
                return aten.cudnn_batch_norm(x, scale, nothing, None, None, True, 0.1, epsilon)[3]

            calls[f"{name} cuDNN"] = lambda: aten.cudnn_batch_norm_backward(
                x, g, scale, None, None, mean, inverse, epsilon, kept()
            )
        return calls

    def _depthwise(self, key: str, data_format: str, operands: dict[str, Any], attributes: dict[str, Any]) -> Calls:
        """Padding is half of the filter on both sides: the same sizes and work as "SAME", which PyTorch has no operator
        for when the stride is not 1."""
        torch, aten = self.module, self.aten
        first = data_format == "NCHW"
        steps = attributes["strides"][2:4] if first else attributes["strides"][1:3]
        layout = torch.contiguous_format if first else torch.channels_last
        name = f"PyTorch {'NCHW' if first else 'channels_last'}"
        if key == "depthwise_filter":
            height, width, channels, _ = attributes["filter_sizes"]
            weight = torch.zeros(channels, 1, height, width)
        else:
            weight = operands["filter"].permute(2, 3, 0, 1)
        weight = weight.contiguous(memory_format=layout)
        channels, _, height, width = weight.shape
        padding = [height // 2, width // 2]
        if key == "depthwise":
            x = self._image(data_format, operands["input"])
            return {name: lambda: torch.conv2d(x, weight, None, steps, padding, 1, channels)}
        g = self._image(data_format, operands["out_backprop"])
        if key == "depthwise_input":
            x, wanted = self._image(data_format, torch.empty(attributes["input_sizes"])), [True, False, False]
        else:
            x, wanted = self._image(data_format, operands["input"]), [False, True, False]
        return {
            name: lambda: aten.convolution_backward(
                g, x, weight, None, steps, padding, [1, 1], False, [0, 0], channels, wanted
            )
        }

    def _compiled(self, key: str, attributes: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
        """The formula, a function of the operands."""
        import formulas

        torch, plain = self.module, getattr(formulas, key)
        numbers = {
            name: torch.tensor(value, device=self.device)
            for name, value in attributes.items()
            if name in ("min", "max")
        }
        options = {name: value for name, value in attributes.items() if name not in numbers}
        compiled = torch.compile(lambda arrays: plain(torch, **arrays, **options), fullgraph=True, dynamic=False)
        return lambda operands: compiled(operands | numbers)

    def small_calls(self) -> Calls:
        import formulas

        import exactqat as eq

        torch = self.module
        x, low, high = torch.from_numpy(SMALL), torch.tensor(LOW), torch.tensor(HIGH)
        leaves = tuple(value.clone().requires_grad_() for value in (x, low, high))
        g = torch.ones_like(x)
        scale, zero = torch.tensor([3 / 255]), torch.tensor([127.0])
        integer = zero.int()
        learned = (leaves[0], scale.requires_grad_(), zero.clone().requires_grad_())

        def ours(x: Any, low: Any, high: Any) -> Any:
            return eq.fake_quant_with_min_max_vars(x, low, high)

        def plain(x: Any, low: Any, high: Any) -> Any:
            return formulas.vars(torch, x, low, high, num_bits=8, narrow_range=False)

        def both(function: Callable[..., Any], leaves: Any) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(function(*leaves), leaves, g)

        calls: Calls = {
            "PyTorch|forward": lambda: torch.fake_quantize_per_tensor_affine(x, scale.detach(), integer, 0, 255),
            "PyTorch|forward and backward": both(
                lambda *a: torch._fake_quantize_learnable_per_tensor_affine(*a, 0, 255), learned
            ),
        }
        compiled = [torch.compile(function, fullgraph=True, dynamic=False) for function in (ours, plain)]
        for who, function in (
            ("exactqat, PyTorch", ours),
            ("exactqat, torch.compile", compiled[0]),
            ("torch.compile of the formula", compiled[1]),
        ):
            calls[f"{who}|forward"] = lambda function=function: function(x, low, high)
            calls[f"{who}|forward and backward"] = both(function, leaves)
        return calls


def _affine(low: float, high: float) -> tuple[float, int]:
    scale = (high - low) / 255
    return scale, min(max(round(-low / scale), 0), 255)


BACKENDS: dict[str, Any] = {"exactqat": ExactQat, "torch": Torch, "jax": Jax, "tensorflow": TensorFlow}
