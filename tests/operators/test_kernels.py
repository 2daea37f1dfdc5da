# SPDX-License-Identifier: Apache-2.0
"""Every kernel of every device against the reference, bit for bit, over all cases."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, cases
from conftest import ANSWERS_NAN, BY_RAW_NAME, DEVICES, SLOW, expected_of, in_halves

from exactqat.operators import OPERATORS, cpu, reference

CASES = list(cases())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_kernel_equals_reference(case: Case, device: str) -> None:
    compare(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", sorted(BY_RAW_NAME))
def test_kernel_equals_reference_in_16_bits(op: str, dtype: str, device: str) -> None:
    bits = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    for case in list(cases(op))[::2]:
        if "float64" not in case.tags:
            compare(in_halves(case, bits), device)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_that_tensorflow_does_not_have(device: str) -> None:
    """They carry the second-order gradients. Each takes the operands of a raw operator's cases."""
    random = np.random.Generator(np.random.PCG64(11))
    for case in cases("FakeQuantWithMinMaxVarsGradient") + cases("FakeQuantWithMinMaxVarsPerChannelGradient"):
        inputs, low, high = (np.array(case.operands[name]) for name in ("inputs", "min", "max"))
        cotangents = [random.standard_normal(a.shape).astype(a.dtype) for a in (inputs, low, high)]
        attributes = {key: case.attributes[key] for key in ("num_bits", "narrow_range")}
        run_and_compare(
            "fake_quant_with_min_max_vars_gradient_transpose", [*cotangents, inputs, low, high], attributes, device
        )
        _, mask = run_and_compare(f"{forward_of(case)}_training", [inputs, low, high], attributes, device)
        run_and_compare(
            "fake_quant_with_min_max_vars_gradient_from_mask_transpose",
            [*cotangents, mask, low, high],
            attributes,
            device,
        )
    for case in cases("FusedBatchNormV3"):
        run_and_compare(
            "channel_sum", [np.array(case.operands["x"])], {"data_format": case.attributes["data_format"]}, device
        )


def forward_of(case: Case) -> str:
    return BY_RAW_NAME[case.op.removesuffix("Gradient")].name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_depthwise_columns_that_meet_nothing(data_format: str, device: str) -> None:
    """Taps further apart than the image is wide: some columns meet no tap; beside them in memory lie other rows."""
    random = np.random.Generator(np.random.PCG64(12))

    def arranged(values: tuple[int, ...]) -> tuple[int, ...]:
        return values if data_format == "NHWC" else tuple(values[i] for i in (0, 3, 1, 2))

    for channels in (1, 3, 17):
        filter = random.standard_normal((4, 4, channels, 1)).astype(np.float32)
        pads = {"H": (2, 3), "W": (3, 2)}
        attributes = {
            "strides": arranged((1, 1, 2, 1)),
            "padding": "EXPLICIT",
            "explicit_paddings": tuple(pad for axis in data_format for pad in pads.get(axis, (0, 0))),
            "data_format": data_format,
            "dilations": arranged((1, 1, 3, 1)),
        }
        image = random.standard_normal(arranged((3, 2, 6, channels))).astype(np.float32)
        gradient = random.standard_normal(arranged((3, 4, 1, channels))).astype(np.float32)
        run_and_compare("depthwise_conv2d_native", [image, filter], attributes, device)
        settings = {"input_sizes": image.shape, **attributes}
        run_and_compare("depthwise_conv2d_native_backprop_input", [filter, gradient], settings, device)
        settings = {"filter_sizes": filter.shape, **attributes}
        run_and_compare("depthwise_conv2d_native_backprop_filter", [image, gradient], settings, device)


def run_and_compare(name: str, operands: list[np.ndarray], attributes: dict, device: str) -> list[np.ndarray]:
    op = OPERATORS[name]
    expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
    results = DEVICES[device](op, operands, attributes)
    for result, wanted in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert_same_bits(result, wanted, what=f"{name} on {device}")
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", ""])
@pytest.mark.parametrize("op", [op for op in sorted(BY_RAW_NAME) if op.startswith("Fake") and op.endswith("Gradient")])
def test_a_gradient_from_the_mask_is_the_gradient_from_the_inputs(op: str, dtype: str, device: str) -> None:
    """The packed mask that the training form keeps says all that the gradient needs to know of the inputs."""
    for case in list(cases(op))[:: 4 if device in SLOW else 1]:
        if dtype and "float64" in case.tags:
            continue
        if dtype:
            bits = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
            case = in_halves(case, bits)
        if isinstance(expected_of(case), Exception):
            continue
        operands, attributes = BY_RAW_NAME[op].bind((), {**case.operands, **case.attributes})
        gradients, inputs, *ranges = [np.array(operand, order="C") for operand in operands]
        outputs, mask = run_and_compare(f"{forward_of(case)}_training", [inputs, *ranges], attributes, device)
        (plain,) = DEVICES[device](OPERATORS[forward_of(case)], [inputs, *ranges], attributes)
        assert_same_bits(outputs, plain, what=f"{case.name} outputs")
        assert mask.shape == ((inputs.size + 3) // 4,) and mask.dtype == np.uint8
        from_mask = f"{BY_RAW_NAME[op].name}_from_mask"
        results = run_and_compare(from_mask, [gradients, mask, *ranges], attributes if ranges else {}, device)
        for result, wanted in zip(results, DEVICES[device](BY_RAW_NAME[op], operands, attributes), strict=True):
            assert_same_bits(result, wanted, what=f"{case.name} on {device}", operands=case.operands)


def compare(case: Case, device: str) -> None:
    op = BY_RAW_NAME[case.op]
    operands, attributes = op.bind((), {**case.operands, **case.attributes})
    operands = [np.array(operand, order="C") for operand in operands]
    expected = expected_of(case)
    if isinstance(expected, Exception) and device not in ANSWERS_NAN:
        with pytest.raises(type(expected)):
            DEVICES[device](op, operands, attributes)
        return
    results = DEVICES[device](op, operands, attributes)
    if isinstance(expected, Exception):  # values that are known on the device only
        assert all(np.isnan(result).all() for result in results), f"{case.name} on {device}"
        return
    for name, result, wanted in zip(op.results, results, expected, strict=True):
        assert_same_bits(result, wanted, what=f"{case.name} {name} on {device}", operands=case.operands)


def test_every_kernel_is_in_every_module() -> None:
    wanted = None
    for name in cpu.INSTRUCTION_SETS:
        kernels = set(cpu.load(name).kernels())
        wanted = wanted or kernels
        assert kernels == wanted


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    # Large enough that every kernel splits its work; odd sizes so that pieces end inside blocks and rows.
    import exactqat as eq

    random = np.random.Generator(np.random.PCG64(5))
    x = random.standard_normal((3, 61, 67, 19), np.float32)
    g = random.standard_normal(x.shape, np.float32)
    w = random.standard_normal((3, 3, 19, 1), np.float32)
    low, high = np.full(19, -1.5, np.float32), np.linspace(0.5, 2, 19, dtype=np.float32)

    def all_results() -> list[np.ndarray]:
        results = [
            eq.fake_quant_with_min_max_vars(x, low[0], high[0]),
            eq.fake_quant_with_min_max_vars_per_channel(x, low, high),
            *eq.fake_quant_with_min_max_vars_gradient(g, x, low[0], high[0]),
            *eq.fake_quant_with_min_max_vars_per_channel_gradient(g, x, low, high),
            eq.quantization.quantize_and_dequantize(x, 0.0, 0.0),
            eq.quantization.quantize_and_dequantize(x, 0.0, 0.0, axis=1),
        ]
        for data_format in ("NHWC", "NCHW"):
            image = x if data_format == "NHWC" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
            gradient = g if data_format == "NHWC" else np.ascontiguousarray(g.transpose(0, 3, 1, 2))
            norm = eq.raw_ops.FusedBatchNormV3(
                x=image, scale=high, offset=low, mean=low, variance=high, data_format=data_format
            )
            results += norm
            results += eq.raw_ops.FusedBatchNormGradV3(
                y_backprop=gradient,
                x=image,
                scale=high,
                reserve_space_1=norm.reserve_space_1,
                reserve_space_2=norm.reserve_space_2,
                reserve_space_3=norm.reserve_space_3,
                data_format=data_format,
            )[:3]
            convolution = {"strides": [1, 1, 1, 1], "padding": "SAME", "data_format": data_format}
            results += [
                eq.raw_ops.DepthwiseConv2dNative(input=image, filter=w, **convolution),
                eq.raw_ops.DepthwiseConv2dNativeBackpropInput(
                    input_sizes=image.shape, filter=w, out_backprop=gradient, **convolution
                ),
                eq.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                    input=image, filter_sizes=w.shape, out_backprop=gradient, **convolution
                ),
            ]
        return results

    before = eq.get_num_threads()
    try:
        eq.set_num_threads(1)
        wanted = all_results()
        eq.set_num_threads(threads)
        for got, expected in zip(all_results(), wanted, strict=True):
            assert_same_bits(got, expected, what=f"a result with {threads} threads")
    finally:
        eq.set_num_threads(before)


def test_both_layouts_sum_in_the_same_order() -> None:
    import exactqat as eq

    random = np.random.Generator(np.random.PCG64(6))
    x = random.standard_normal((5, 13, 11, 7), np.float32)
    ones = np.ones(7, np.float32)
    last = eq.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=ones, variance=ones)
    first = eq.raw_ops.FusedBatchNormV3(
        x=x.transpose(0, 3, 1, 2), scale=ones, offset=ones, mean=ones, variance=ones, data_format="NCHW"
    )
    assert_same_bits(first.y.transpose(0, 2, 3, 1), last.y, what="y")
    for name in ("batch_mean", "batch_variance"):
        assert_same_bits(getattr(first, name), getattr(last, name), what=name)
