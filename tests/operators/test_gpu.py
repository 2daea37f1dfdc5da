# SPDX-License-Identifier: Apache-2.0
"""On a GPU, with PyTorch: the CPU's bits where an interpreter would not notice a difference (fusion, order, denormals,
division), and everything PyTorch does with operators there. `make test-gpu` runs it with all cases of test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import as_array

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import exactqat as eq  # noqa: E402
from exactqat.operators import OPERATORS  # noqa: E402
from exactqat.operators import triton as room  # noqa: E402
from exactqat.operators.declarations.specification import TensorSpec  # noqa: E402

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def normal(seed: int, *shape: int, dtype: str = "float32", scale: float = 1.0) -> Any:
    random = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(np.asarray(random.standard_normal(shape) * scale)).to(DTYPES[dtype])


def wide(seed: int, *shape: int, dtype: str = "float32") -> Any:
    """Numbers over forty binary orders of magnitude: their sum shows the order it was taken in."""
    random = np.random.Generator(np.random.PCG64(seed))
    values = np.ldexp(random.standard_normal(shape), random.integers(-20, 20, shape))
    return torch.from_numpy(np.asarray(values)).to(DTYPES[dtype])


def bits(dtype: str) -> Any:
    """Every kind of number: random bit patterns with normal, denormal, infinite and NaN among them."""
    random = np.random.Generator(np.random.PCG64(17))
    width = {"float64": np.uint64, "float32": np.uint32}.get(dtype, np.uint16)
    patterns = random.integers(0, np.iinfo(width).max, 1 << 20, width, endpoint=True)
    signed = torch.from_numpy(patterns.view(np.dtype(width).name.removeprefix("u")))
    return signed.view(DTYPES[dtype])


def assert_same(function: Callable[..., Any], *tensors: Any, what: str = "") -> None:
    """The bits of the CPU, for all results."""
    got = function(*[tensor.cuda() for tensor in tensors])
    wanted = function(*tensors)
    several = isinstance(got, tuple)
    for i, (a, b) in enumerate(zip(got if several else (got,), wanted if several else (wanted,), strict=True)):
        assert a.is_cuda
        assert_same_bits(as_array(a.detach()), as_array(b.detach()), what=f"{what} {i}")


def run_with(name: str, tensors: list[Any], attributes: dict[str, Any], **options: Any) -> list[Any]:
    """The kernels launched with other options than those of their plans."""
    op = OPERATORS[name]
    specs = tuple(TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    lowered = op.lower(specs, tuple(op.bind(tuple(tensors), attributes)[1].items()))
    plan = room.plan(specs, lowered)
    plan = plan._replace(launches=tuple(e._replace(options=e.options | options) for e in plan.launches))
    buffers = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
        for spec in (*lowered.results, *plan.scratch)
    ]
    room.run(plan, [*tensors, *buffers])
    return buffers[: len(lowered.results)]


# Numbers


def low_and_high(channels: int, dtype: str) -> tuple[Any, Any]:
    wide_dtype = dtype if dtype == "float64" else "float32"
    return -normal(1, channels, dtype=wide_dtype).abs() - 0.01, normal(2, channels, dtype=wide_dtype).abs() + 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(7,), (4096,), (1 << 20,), (1_000_003,), (129, 33, 7), (1000, 257), (64, 31, 33, 96)]
)
def test_fake_quant_on_many_values(shape: tuple[int, ...], dtype: str) -> None:
    x, g = normal(3, *shape, dtype=dtype), normal(4, *shape, dtype=dtype)
    low, high = low_and_high(shape[-1], dtype)
    for num_bits in (8, 4, 16):
        assert_same(lambda t, n=num_bits: eq.fake_quant_with_min_max_args(t, num_bits=n), x, what="args")
        assert_same(
            lambda t, a, b, n=num_bits: eq.fake_quant_with_min_max_vars(t, a, b, num_bits=n), x, low[0], high[0]
        )
        assert_same(
            lambda t, a, b, n=num_bits: eq.fake_quant_with_min_max_vars_per_channel(t, a, b, num_bits=n), x, low, high
        )
    assert_same(eq.fake_quant_with_min_max_args_gradient, g, x)
    assert_same(eq.fake_quant_with_min_max_vars_gradient, g, x, low[0], high[0])
    assert_same(eq.fake_quant_with_min_max_vars_per_channel_gradient, g, x, low, high)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 0, 1, 3])
def test_quantize_and_dequantize_on_many_values(axis: int, dtype: str) -> None:
    x = normal(5, 37, 64, 19, 50, dtype=dtype)
    low, high = low_and_high(x.shape[axis], dtype)
    if axis < 0:
        low, high = low[0], high[0]
    for round_mode in ("HALF_TO_EVEN", "HALF_UP"):
        for flag in (True, False):
            assert_same(
                lambda t, a, b, r=round_mode, g=flag: eq.raw_ops.QuantizeAndDequantizeV2(
                    input=t, input_min=a, input_max=b, range_given=g, round_mode=r, axis=axis
                ),
                x,
                low,
                high,
            )
    assert_same(
        lambda *t: eq.raw_ops.QuantizeAndDequantizeV4Grad(
            gradients=t[0], input=t[1], input_min=t[2], input_max=t[3], axis=axis
        ),
        normal(6, *x.shape, dtype=dtype),
        x,
        low,
        high,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(-1.0, 1.5), (0.0, 6.0), (-1e-37, 1.2e-37), (-1e38, 1.5e38), (0.0, 1.2e-38)])
def test_all_kinds_of_numbers(bounds: tuple[float, float], dtype: str) -> None:
    x = bits(dtype)
    low, high = (torch.tensor(bound, dtype=torch.float64 if dtype == "float64" else torch.float32) for bound in bounds)
    assert_same(eq.fake_quant_with_min_max_vars, x, low, high)
    assert_same(lambda t: eq.fake_quant_with_min_max_args(t, *bounds), x)
    assert_same(eq.fake_quant_with_min_max_vars_gradient, x.flip(0), x, low, high)
    assert_same(lambda t, a, b: eq.quantization.quantize_and_dequantize_v2(t, a, b, range_given=True), x, low, high)
    finite = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    assert_same(lambda t: eq.quantization.quantize_and_dequantize(t, 0.0, 0.0), finite)
    assert_same(lambda t: eq.quantization.quantize_and_dequantize(t, 0.0, 0.0), x)  # NaN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4095, 4096, 4097, 32_768, 262_145])
def test_sums_have_the_cpus_order(rows: int, dtype: str) -> None:
    low, high = low_and_high(24, dtype)
    for channels in (1, 3, 24):
        x, g = normal(7, rows, channels, dtype=dtype), wide(8, rows, channels, dtype=dtype)
        ranges = (low[:channels], high[:channels])
        assert_same(eq.fake_quant_with_min_max_vars_per_channel_gradient, g, x, *ranges)
        assert_same(eq.fake_quant_with_min_max_vars_gradient, g, x, low[0], high[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("shape", [(2, 9, 7, 3), (8, 56, 56, 24), (3, 61, 67, 19)])
def test_layers_of_networks(shape: tuple[int, ...], data_format: str, dtype: str) -> None:
    n, h, w, c = shape
    layout = {"data_format": data_format}
    shape = shape if data_format == "NHWC" else (n, c, h, w)
    x, g = normal(9, *shape, dtype=dtype), normal(10, *shape, dtype=dtype)
    ones, offset = torch.ones(c), normal(11, c)
    for is_training in (True, False):
        norm = {**layout, "is_training": is_training}

        def forward(x: Any, *vectors: Any, norm: dict[str, Any] = norm) -> Any:
            scale, offset, mean, variance = vectors
            return tuple(
                eq.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=offset, mean=mean, variance=variance, **norm)
            )

        def backward(g: Any, x: Any, *vectors: Any, norm: dict[str, Any] = norm) -> Any:
            scale, mean, variance = vectors
            return tuple(
                eq.raw_ops.FusedBatchNormGradV3(
                    y_backprop=g,
                    x=x,
                    scale=scale,
                    reserve_space_1=mean,
                    reserve_space_2=variance,
                    reserve_space_3=mean[0],
                    **norm,
                )[:3]
            )

        assert_same(forward, x, ones, offset, offset * 2, ones, what="batch norm")
        assert_same(backward, g, x, ones, offset, ones, what="batch norm gradient")
    weights = normal(12, 3, 3, c, 1, dtype=dtype)
    for stride in (1, 2):
        strides = [1, stride, stride, 1] if data_format == "NHWC" else [1, 1, stride, stride]
        how = {**layout, "strides": strides, "padding": "SAME"}
        assert_same(lambda x, w, how=how: eq.raw_ops.DepthwiseConv2dNative(input=x, filter=w, **how), x, weights)
        y = normal(13, *eq.raw_ops.DepthwiseConv2dNative(input=x, filter=weights, **how).shape, dtype=dtype)
        assert_same(
            lambda w, y, how=how: eq.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=shape, filter=w, out_backprop=y, **how
            ),
            weights,
            y,
        )
        assert_same(
            lambda x, y, how=how: eq.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                input=x, filter_sizes=(3, 3, c, 1), out_backprop=y, **how
            ),
            x,
            y,
        )


def test_a_fused_multiply_add_would_be_noticed() -> None:
    x = normal(3, 1 << 20).cuda()
    tensors = [x, torch.tensor(-1.1).cuda(), torch.tensor(1.3).cuda()]
    name, attributes = "fake_quant_with_min_max_vars_per_channel", {"num_bits": 16}
    channels = [x.reshape(-1, 1), tensors[1].reshape(1), tensors[2].reshape(1)]
    (right,) = run_with(name, channels, attributes)
    (fused,) = run_with(name, channels, attributes, enable_fp_fusion=True)
    assert (right != fused).any()


def test_another_order_would_be_noticed() -> None:
    x, g = normal(7, 10_000, 64, dtype="float64").cuda(), wide(8, 10_000, 64, dtype="float64").cuda()
    low, high = (t.cuda() for t in low_and_high(64, "float64"))
    forward = eq.fake_quant_with_min_max_vars_per_channel_gradient(g, x, low, high)
    backward = eq.fake_quant_with_min_max_vars_per_channel_gradient(g.flip(0), x.flip(0), low, high)
    assert (forward[1] != backward[1]).any()


def test_bits_do_not_depend_on_the_number_of_warps() -> None:
    x, g = normal(7, 5000, 24).cuda(), wide(8, 5000, 24).cuda()
    low, high = (t.cuda() for t in low_and_high(24, "float32"))
    name = "fake_quant_with_min_max_vars_per_channel_gradient"
    wanted = run_with(name, [g, x, low, high], {})
    for num_warps in (1, 2, 8):
        for a, b in zip(run_with(name, [g, x, low, high], {}, num_warps=num_warps), wanted, strict=True):
            assert torch.equal(a, b)


def test_bits_are_the_same_in_every_run() -> None:
    x, g = normal(7, 100_000, 24).cuda(), wide(8, 100_000, 24).cuda()
    low, high = (t.cuda() for t in low_and_high(24, "float32"))
    first = eq.fake_quant_with_min_max_vars_per_channel_gradient(g, x, low, high)
    for _ in range(20):
        for a, b in zip(eq.fake_quant_with_min_max_vars_per_channel_gradient(g, x, low, high), first, strict=True):
            assert torch.equal(a, b)


def test_more_elements_than_32_bits_can_count() -> None:
    size = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.zeros(size, dtype=torch.float16, device="cuda")
    tail = normal(14, 8192, dtype="float16")
    x[-8192:] = tail.cuda()
    low, high = torch.tensor(-1.0), torch.tensor(1.5)
    y = eq.fake_quant_with_min_max_vars(x, low.cuda(), high.cuda())
    assert_same_bits(as_array(y[-8192:]), as_array(eq.fake_quant_with_min_max_vars(tail, low, high)), what="the end")
    assert y[:-8192].count_nonzero() == 0
    del y
    _, to_min, _ = eq.fake_quant_with_min_max_vars_gradient(x, x, low.cuda(), high.cuda())
    _, expected, _ = eq.fake_quant_with_min_max_vars_gradient(tail, tail, low, high)
    assert abs(to_min.item() - expected.item()) <= 1e-6 * abs(expected.item())  # other blocks, other roundings
    y = eq.quantization.quantize_and_dequantize(x, 0.0, 0.0)
    assert_same_bits(
        as_array(y[-8192:]), as_array(eq.quantization.quantize_and_dequantize(tail, 0.0, 0.0)), what="the end"
    )


# PyTorch


def inputs() -> tuple[Any, Any, Any]:
    low, high = low_and_high(32, "float32")
    return normal(15, 16, 14, 14, 32), low, high


def gradients(device: str, function: Callable[..., Any] | None = None) -> list[Any]:
    x, low, high = (t.to(device).requires_grad_() for t in inputs())
    function = function or eq.fake_quant_with_min_max_vars_per_channel
    result = function(x, low, high)
    first = torch.autograd.grad(result, (x, low, high), torch.ones_like(result) * 0.37, create_graph=True)
    return [result.detach(), *(g.detach() for g in first)]


def test_autograd() -> None:
    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert_same_bits(as_array(a), as_array(b), what="a gradient")


def test_second_order() -> None:
    def second(device: str) -> Any:
        x, low, high = (t.to(device).requires_grad_() for t in inputs())
        g = torch.full_like(x, 0.37, requires_grad=True)
        first = torch.autograd.grad(
            eq.fake_quant_with_min_max_vars_per_channel(x, low, high), (x, low, high), g, create_graph=True
        )
        (answer,) = torch.autograd.grad(first, g, [torch.full_like(t, 0.5) for t in first])
        return answer

    assert_same_bits(as_array(second("cuda")), as_array(second("cpu")), what="the second order")


def test_compile() -> None:
    compiled = torch.compile(eq.fake_quant_with_min_max_vars_per_channel, fullgraph=True)
    for a, b in zip(gradients("cuda", compiled), gradients("cpu"), strict=True):
        assert_same_bits(as_array(a), as_array(b), what="a gradient of the compiled function")


def everything(x: Any, low: Any, high: Any) -> list[Any]:
    """At least one call of each family, forward and gradient, with the range given and from the data."""
    ones = torch.ones_like(low)
    norm = eq.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=low, mean=low, variance=ones)
    how = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    filter = x[:1, :3, :3].permute(1, 2, 3, 0)
    return [
        eq.fake_quant_with_min_max_vars(x, low[0], high[0]),
        *eq.fake_quant_with_min_max_vars_per_channel_gradient(x, x, low, high),
        eq.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=low, input_max=high, range_given=True, axis=3),
        eq.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=low, input_max=high, axis=3),
        *norm[:5],
        eq.raw_ops.DepthwiseConv2dNative(input=x, filter=filter, **how),
        eq.raw_ops.DepthwiseConv2dNativeBackpropFilter(input=x, filter_sizes=filter.shape, out_backprop=x, **how),
    ]


def test_nothing_waits_for_the_device() -> None:
    tensors = [t.cuda() for t in inputs()]
    leaves = [t.clone().requires_grad_() for t in tensors]

    def step() -> None:
        everything(*tensors)
        result = eq.fake_quant_with_min_max_vars_per_channel(*leaves)
        result.backward(torch.ones_like(result))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph() -> None:
    tensors = [t.cuda() for t in inputs()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything(*tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(*tensors)
    fresh = normal(16, *tensors[0].shape)
    tensors[0].copy_(fresh)
    graph.replay()
    for a, b in zip(captured, everything(fresh, *inputs()[1:]), strict=True):
        assert_same_bits(as_array(a), as_array(b), what="a result of the graph")


def test_stream() -> None:
    tensors = [t.cuda() for t in inputs()]
    wanted = everything(*tensors)
    stream = torch.cuda.Stream()
    # A busy machine may take longer to launch than the card to wait: then it has to wait longer.
    for seconds in (1, 4, 16):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000 * seconds)
            late = tensors[0] + 0
            got = everything(late, *tensors[1:])
            waiting = not stream.query()
        stream.synchronize()
        for a, b in zip(got, wanted, strict=True):
            assert_same_bits(as_array(a), as_array(b), what="a result on another stream")
        if waiting:
            return
    pytest.fail("the calls did not join the current stream")


def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [t.to("cuda:1") for t in inputs()]
    for a, b in zip(everything(*tensors), everything(*inputs()), strict=True):
        assert a.device == tensors[0].device
        assert_same_bits(as_array(a), as_array(b), what="a result on the second device")


def test_automatic_mixed_precision() -> None:
    x, low, high = (t.cuda() for t in inputs())
    linear = torch.nn.Linear(32, 32).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        hidden = linear(x)
        y = eq.fake_quant_with_min_max_vars_per_channel(hidden, low, high)
    assert y.dtype == hidden.dtype == torch.bfloat16
    expected = eq.fake_quant_with_min_max_vars_per_channel(hidden.cpu(), low.cpu(), high.cpu())
    assert_same_bits(as_array(y.detach()), as_array(expected.detach()), what="the result under autocast")
    y.float().sum().backward()
    assert linear.weight.grad is not None


def test_devices_must_agree() -> None:
    x, low, high = inputs()
    with pytest.raises(ValueError, match="device"):
        eq.fake_quant_with_min_max_vars_per_channel(x.cuda(), low, high)


def test_a_range_that_is_not_one_gives_nan() -> None:
    x = inputs()[0].cuda()
    assert torch.isnan(eq.quantization.quantize_and_dequantize_v2(x, 1.0, -1.0, range_given=True)).all()
