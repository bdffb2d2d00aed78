"""Corners of operators: what the specification says of them, or a refusal that names the operator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.testing.onnx_nodes import compare, model, numbers, refused

pytest.importorskip("onnxruntime")
node = helper.make_node


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8", "int64"])
def test_signs_of_integers(dtype):
    x = np.array([0, 1, 7, 100], dtype) - np.array(dtype[0] == "i", dtype)
    compare(model([node("Sign", ["x"], ["y"])], {"x": x}), {"x": x})


def test_negatives_of_unsigned_integers_are_refused():
    x = np.arange(3, dtype="uint8")
    refused(model([node("Neg", ["x"], ["y"], name="n")], {"x": x}), r"Neg \(node 'n'\).*uint8")
    signed = x.astype("int8")
    compare(model([node("Neg", ["x"], ["y"])], {"x": signed}), {"x": signed})


@pytest.mark.parametrize("shape", [(2, 7), (1, 7, 2, 3), (1, 7, 5), (1, 7, 2, 3, 2)])
@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_local_response(size, shape):
    """By the specification's formula: onnxruntime has odd sizes of images only, onnx's reference drops a channel."""
    x = numbers(*shape)
    settings = {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}
    total = np.zeros(shape)
    for c in range(shape[1]):
        low, high = max(0, c - (size - 1) // 2), min(shape[1] - 1, c + size // 2)
        total[:, c] = (x[:, low : high + 1].astype("float64") ** 2).sum(1)
    wanted = x / (1.5 + 0.5 / size * total) ** 0.6
    proto = model([node("LRN", ["x"], ["y"], **settings)], {"x": x}, opset=13)
    compare(proto, {"x": x}, [wanted.astype("float32")])


@pytest.mark.parametrize("spatial", [0, 1])
@pytest.mark.parametrize("opset", [7, 8])
def test_batch_norm_of_elements(opset, spatial):
    x, shape = numbers(2, 3, 4), (3,) if spatial else (3, 4)
    stored = {name: numbers(*shape, seed=i) for i, name in enumerate("sbm")}
    stored["v"] = np.abs(numbers(*shape, seed=9)) + np.float32(0.1)
    norm = node("BatchNormalization", ["x", *stored], ["y"], spatial=spatial)
    compare(model([norm], {"x": x}, stored, opset), {"x": x})


@pytest.mark.parametrize("scales", [(0.6, 0.7), (0.5, 0.5), (0.3, 2.0), (1.2, 1.7), (2.0, 3.0)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_opset_10(mode, scales):
    """An axis that shrinks takes the next element, one that grows the one before."""
    x = numbers(1, 2, 7, 10)
    stored = {"s": np.array([1, 1, *scales], "float32")}
    compare(model([node("Resize", ["x", "s"], ["y"], mode=mode)], {"x": x}, stored, 10), {"x": x})


def test_resize_of_its_own_conformance_test():
    x = np.arange(1, 9, dtype="float32").reshape(1, 1, 2, 4)
    stored = {"s": np.array([1, 1, 0.6, 0.6], "float32")}
    proto = model([node("Resize", ["x", "s"], ["y"], mode="nearest")], {"x": x}, stored, 10)
    compare(proto, {"x": x}, [np.array([[[[1, 3]]]], "float32")])


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_windows_that_do_not_fit(operator):
    x = numbers(1, 1, 5, 5)

    def pool(**attributes):
        return model([node(operator, ["x"], ["y"], name="p", **attributes)], {"x": x}, opset=18)

    message = rf"{operator} \(node 'p'\).*windows of 10 elements do not fit into axis 3 of 5"
    refused(pool(kernel_shape=[5, 10], pads=[2] * 4), message, UnsupportedOperatorError)
    compare(pool(kernel_shape=[5, 9], pads=[2] * 4), {"x": x})
    compare(pool(kernel_shape=[10, 10], pads=[2] * 4, strides=[3, 3], ceil_mode=1), {"x": x})


def test_places_of_windows_that_do_not_fit():
    x = numbers(1, 1, 5, 5)
    pool = node("MaxPool", ["x"], ["y", "i"], name="p", kernel_shape=[6, 6])
    refused(model([pool], {"x": x}, outputs=("y", "i")), r"MaxPool \(node 'p'\).*do not fit")


def test_windows_of_padding_are_refused():
    x = numbers(1, 1, 5, 5)
    for operator in ("MaxPool", "AveragePool"):
        pool = node(operator, ["x"], ["y"], name="p", kernel_shape=[2, 2], pads=[2, 2, 0, 0])
        refused(model([pool], {"x": x}), rf"{operator} \(node 'p'\).*as wide as its windows of 2")


@pytest.mark.parametrize(("size", "dilation"), [(6, 1), (3, 3)])
def test_kernels_that_do_not_fit(size, dilation):
    x = numbers(1, 1, 5)
    conv = node("Conv", ["x", "w"], ["y"], name="c", dilations=[dilation])
    refused(model([conv], {"x": x}, {"w": numbers(1, 1, size)}), r"Conv \(node 'c'\).*do not fit")
    conv = node("Conv", ["x", "w"], ["y"], dilations=[dilation], pads=[1, 1])
    compare(model([conv], {"x": x}, {"w": numbers(1, 1, size)}), {"x": x})


@pytest.mark.parametrize("operator", ["Elu", "Celu", "Selu", "LeakyRelu", "ThresholdedRelu"])
def test_infinite_factors_are_refused(operator):
    x = numbers(4)
    made = node(operator, ["x"], ["y"], name="a", alpha=float("inf"))
    refused(model([made], {"x": x}), rf"{operator} \(node 'a'\).*alpha is infinite")
    compare(model([node(operator, ["x"], ["y"], alpha=0.5)], {"x": x}), {"x": x})


def test_infinite_limits_are_none():
    x = numbers(4)
    clip = node("Clip", ["x"], ["y"], min=float("-inf"), max=0.5)
    compare(model([clip], {"x": x}, opset=6), {"x": x}, [np.minimum(x, np.float32(0.5))])


def test_a_negative_cap_of_scores_is_refused():
    x = numbers(1, 1, 2, 4)
    attention = node("Attention", ["x", "x", "x"], ["y"], name="a", softcap=-1.0)
    refused(model([attention], {"x": x}, opset=23), r"Attention \(node 'a'\).*softcap of -1")


def test_what_inference_does_not_understand_is_named():
    x = numbers(1, 1, 5, 5)
    pool = node("MaxPool", ["x"], ["y"], name="p", kernel_shape=[2, 2], pads=[-1, 0, 0, 0])
    refused(model([pool], {"x": x}), r"MaxPool, node name: p\).*negative")


def test_powers_of_integers_by_fractions():
    x, e = np.array([2, 3, 5, 7, 0], "int64"), np.array([1.9, 2.0, 3.0, 0.5, 2.5], "float32")
    compare(model([node("Pow", ["x", "e"], ["y"])], {"x": x, "e": e}), {"x": x, "e": e})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["int32", "int64", "float32"])
def test_powers_of_integers_that_are_none(dtype, kind):
    """NaN, infinity and numbers that are too large are the least integer, also where a narrow type follows."""
    x, e = np.array([-1, 0, 0, 3, -2], dtype), np.array([2, -1, 0, 2, 3], kind)
    if kind == "float32":
        x, e = np.append(x, [-1, -8]).astype(dtype), np.append(e, [0.5, -0.25]).astype(kind)
    with np.errstate(all="ignore"):
        power = x.astype("float64") ** e.astype("float64")
    fits = np.isfinite(power)
    wanted = np.where(fits, np.where(fits, power, 0).round(), np.iinfo(dtype).min)
    nodes = [node("Pow", ["x", "e"], ["p"]), node("Cast", ["p"], ["y"], to=11)]
    compare(model(nodes, {"x": x, "e": e}), {"x": x, "e": e}, [wanted])


@pytest.mark.parametrize(("scale", "bias"), [((1,), (4,)), ((3, 1), (1, 4)), ((3, 4), (3, 4))])
def test_scales_of_layer_norms_broadcast(scale, bias):
    x, stored = numbers(2, 3, 4), {"b": numbers(*bias, seed=2)}
    given = {"x": x, "s": numbers(*scale, seed=1)}
    norm = node("LayerNormalization", ["x", "s", "b"], ["y"], axis=2 if scale == (1,) else 1)
    compare(model([norm], given, stored), given)


def test_batch_norm_of_one_channel():
    x, stored = numbers(5), {name: np.abs(numbers(1, seed=i)) for i, name in enumerate("sbmv")}
    norm = node("BatchNormalization", ["x", *stored], ["y"])
    compare(model([norm], {"x": x}, stored), {"x": x})


def test_factors_of_integer_products():
    inputs = {"a": np.arange(6, dtype="int32").reshape(2, 3), "b": np.ones((3, 2), "int32")}
    gemm = node("Gemm", ["a", "b"], ["y"], name="g", alpha=0.5)
    refused(model([gemm], inputs), r"Gemm \(node 'g'\).*alpha of 0.5.*int32")
    wanted = 2 * (inputs["a"] @ inputs["b"])
    compare(model([node("Gemm", ["a", "b"], ["y"], alpha=2.0)], inputs), inputs, [wanted])


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_transposed_windows_smaller_than_their_strides(mode):
    x, stored = numbers(1, 2, 3, 4), {"w": numbers(2, 1, 3, 2)}

    def conv(**attributes):
        made = node("ConvTranspose", ["x", "w"], ["y"], name="c", auto_pad=mode, **attributes)
        return model([made], {"x": x}, stored)

    refused(conv(strides=[2, 3]), r"ConvTranspose \(node 'c'\).*pad differently for " + mode)
    compare(conv(strides=[2, 2]), {"x": x})


@pytest.mark.parametrize("groups", [1, 3])
def test_outputs_without_a_type(groups):
    """Inference knows nothing of an operator that is a function: the checker wants types nevertheless."""
    x, stored = numbers(2, 6, 4), {"s": numbers(6, seed=1), "b": numbers(6, seed=2)}
    norm = node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=groups)
    proto = model([norm], {"x": x}, stored, opset=21)
    compare(proto, {"x": x})


def test_truth_values_are_compared():
    x, z = np.array([True, True, False, False]), np.array([True, False, True, False])
    compare(model([node("Equal", ["x", "z"], ["y"])], {"x": x, "z": z}), {"x": x, "z": z})
    x, z = x.astype("int32"), z.astype("int32")
    compare(model([node("Equal", ["x", "z"], ["y"])], {"x": x, "z": z}), {"x": x, "z": z})


@pytest.mark.parametrize("factor", [0, 1])
def test_quantising_zeros_dynamically(factor):
    x = factor * numbers(3, 4)
    quantize = node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    compare(model([quantize], {"x": x}, opset=11, outputs=("y", "s", "z")), {"x": x})


def test_operators_whose_names_are_not_text():
    proto = model([node("Atan", ["x"], ["y"])], {"x": numbers(3)})
    compare(proto, {"x": numbers(3)})
    proto.graph.node[0].op_type = "Ata\n"
    refused(proto, "names that are not text")


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_padding_by_less_than_nothing(mode):
    """What is cut off is gone before the rest is repeated."""
    x = numbers(5, 6)
    for stored in (
        {"p": np.array([-1, 2, 2, -1])},
        {"p": np.array([2, -2]), "v": np.float32(0), "a": np.array([-1])},
        {"p": np.array([1, 2, 0, 1])},
    ):
        made = node("Pad", ["x", *stored], ["y"], mode=mode)
        compare(model([made], {"x": x}, stored, opset=19), {"x": x})


@pytest.mark.parametrize("opset", [7, 10])
def test_masks_of_old_dropouts(opset):
    x = numbers(4)
    made = node("Dropout", ["x"], ["y", "m"], name="d")
    refused(
        model([made], {"x": x}, opset=opset, outputs=("y", "m")),
        rf"Dropout \(node 'd'\).*opset {opset}",
    )
    compare(model([made], {"x": x}, opset=opset), {"x": x}, [x])
    compare(model([made], {"x": x}, opset=13, outputs=("y", "m")), {"x": x})


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel", None])
def test_regions_are_scaled_and_then_moved(mode, scale):
    x, batch = numbers(1, 2, 8, 8), np.array([0, 0])
    regions = np.array([[0, 0, 4, 4], [1, 1, 7, 6]], "float32")
    settings = {} if mode is None else {"coordinate_transformation_mode": mode}
    made = node(
        "RoiAlign", ["x", "r", "b"], ["y"], output_height=3, output_width=2, sampling_ratio=2,
        spatial_scale=scale, **settings,
    )  # fmt: skip
    inputs = {"x": x, "r": regions, "b": batch}
    compare(model([made], inputs, opset=16), inputs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("operator", ["Elu", "Selu"])
def test_exponential_units(operator, dtype):
    x = np.array([-800, -2, -0.5, 0, 0.5, 800, np.inf, -np.inf], dtype)
    wanted = np.where(x > 0, x, 0.7 * np.expm1(np.minimum(x, 0)))
    settings = {"alpha": 0.7} | ({"gamma": 2.0} if operator == "Selu" else {})
    wanted = (wanted * settings.get("gamma", 1)).astype(dtype)
    compare(model([node(operator, ["x"], ["y"], **settings)], {"x": x}), {"x": x}, [wanted])


def test_paddings_that_there_are_not():
    x = numbers(1, 1, 4, 4)
    for operator, stored in (("LpPool", {}), ("MaxPool", {}), ("Conv", {"w": numbers(1, 1, 2, 2)})):

        def made(mode, operator=operator, stored=stored):
            given = node(
                operator, ["x", *stored], ["y"], name="p", kernel_shape=[2, 2], auto_pad=mode
            )
            return model([given], {"x": x}, stored)

        refused(made("SAME"), rf"{operator} \(node 'p'\).*auto_pad 'SAME'")
        compare(made("SAME_UPPER"), {"x": x})


def test_kernels_of_nan_are_refused():
    x, w = numbers(1, 1, 3), numbers(1, 1, 2)
    conv = node("ConvTranspose", ["x", "w"], ["y"], name="c", strides=[2])
    compare(model([conv], {"x": x}, {"w": w}), {"x": x})
    w[0, 0, 0] = np.nan
    refused(model([conv], {"x": x}, {"w": w}), r"ConvTranspose \(node 'c'\).*NaN")


def test_recurrent_weights_of_other_sizes():
    x = numbers(3, 1, 2)
    stored = {"w": numbers(1, 4, 2), "r": numbers(1, 4, 4)}
    layer = node("RNN", ["x", "w", "r"], ["", "y"], name="n", hidden_size=4)
    compare(model([layer], {"x": x}, stored), {"x": x})
    stored["w"] = numbers(1, 3, 2)
    refused(model([layer], {"x": x}, stored), r"RNN \(node 'n'\).*W of shape \[1, 3, 2\]")


def test_frames_of_the_length_of_their_window():
    inputs, stored = {"x": numbers(1, 32, 1)}, {"s": np.array(8), "w": np.abs(numbers(16))}
    compare(model([node("STFT", ["x", "s", "w"], ["y"])], inputs, stored), inputs)


@pytest.mark.parametrize("opset", [9, 10, 11, 13])
def test_the_largest_of_every_opset(opset):
    """Their number is an attribute first, then an operand."""
    x = numbers(3, 6)
    stored = {"k": np.array([2])} if opset >= 10 else {}
    settings = {} if stored else {"k": 2}
    made = node("TopK", ["x", *stored], ["y", "i"], axis=1, **settings)
    compare(model([made], {"x": x}, stored, opset, outputs=("y", "i")), {"x": x})


@pytest.mark.parametrize("operator", ["Mul", "Div", "Add"])
@pytest.mark.parametrize("stored", [np.float32(0), np.zeros((2, 1), "float32"), np.float32(2)])
def test_stored_zeros(operator, stored):
    """What is undefined of NaN, infinities and 0 stays so."""
    x = np.array([1, 0, -1, np.inf, np.nan], "float32")
    for operands in (["x", "z"], ["z", "x"]):
        compare(model([node(operator, operands, ["y"])], {"x": x}, {"z": stored}), {"x": x})


@pytest.mark.parametrize("size", [0, 2**31 - 1])
def test_regions_that_cannot_be(size):
    x = numbers(1, 3, 2, 2)
    proto = model([node("LRN", ["x"], ["y"], name="l", size=size)], {"x": x}, opset=13)
    refused(proto, rf"LRN \(node 'l'\).*{size} channels")


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("axis", [2, -3, 2**31 - 1])
def test_a_running_sum_along_no_axis_is_refused(axis, is_stored):
    stored = {"axis": np.array(axis)}
    given = {"z": numbers(2, 3).astype("int64")}
    (stored if is_stored else given)["x"] = np.arange(6).reshape(2, 3)
    nodes = [node("CumSum", ["x", "axis"], ["s"], name="c"), node("Add", ["s", "z"], ["y"])]
    refused(model(nodes, given, stored), rf"CumSum \(node 'c'\).*no axis {axis}")


@pytest.mark.parametrize("axis", [1, -2])
def test_a_running_sum_along_an_axis(axis):
    given = {"x": np.arange(6).reshape(2, 3)}
    compare(model([node("CumSum", ["x", "axis"], ["y"])], given, {"axis": np.array(axis)}), given)
