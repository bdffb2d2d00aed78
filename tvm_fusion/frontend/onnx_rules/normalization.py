"""Normalizations with the outputs and forms that TVM 0.27 imports otherwise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def layer_normalization(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """LayerNormalization with the mean and the inverse deviation, which TVM gives as empty tensors, or of float64.

    Scales and biases that broadcast get the shape of what is normalized, which TVM wants.
    """
    x, scale, bias = editor.operands(node, 3)
    attributes = editor.attributes(node)
    if not any(node.output[1:]) and editor.dtype(x) != np.dtype("float64"):
        shape = editor.shape(x)
        whole = shape and shape[attributes.get("axis", -1) % len(shape) :]
        given = [name for name in (scale, bias) if name]
        if not whole or all(editor.shape(name) in (whole, None) for name in given):
            return None
        given = [_expanded(editor, name, whole) for name in given]
        return [editor.add("LayerNormalization", x, *given, **attributes)]
    rank = len(editor.dims(x) or ())
    if not rank:
        editor.refuse("the rank of its input is not known")
    axes = list(range(attributes.get("axis", -1) % rank, rank))
    dtype = editor.dtype(x) or np.dtype("float32")
    wide = editor.cast(x, "float32") if dtype.itemsize == 2 else x
    mean = editor.reduce("ReduceMean", wide, axes)
    centred = editor.add("Sub", wide, mean)
    variance = editor.reduce("ReduceMean", editor.add("Mul", centred, centred), axes)
    inverse = _inverse_root(editor, variance, attributes.get("epsilon", 1e-5), dtype)
    normal = editor.add("Mul", centred, inverse)
    normal = editor.cast(normal, dtype) if dtype.itemsize == 2 else normal
    y = editor.add("Mul", normal, scale)
    return [editor.add("Add", y, bias) if bias else y, mean, inverse]


def _expanded(editor: Editor, name: str, shape: tuple[int, ...]) -> str:
    stored = editor.value(name)
    if stored is not None:
        return editor.store(np.broadcast_to(stored, shape))
    return editor.add("Expand", name, np.array(shape))


def _inverse_root(editor: Editor, variance: str, epsilon: float, dtype: np.dtype) -> str:
    wide = "float64" if dtype.itemsize == 8 else "float32"
    root = editor.add("Sqrt", editor.add("Add", variance, np.array(epsilon, wide)))
    return editor.add("Div", np.ones((), wide), root)


def rms_normalization(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """RMSNormalization over several axes: over all of them as one."""
    attributes = editor.attributes(node)
    x, scale = node.input
    shape = editor.shape(x)
    if shape is None:
        return None
    axis = attributes.get("axis", -1) % len(shape)
    if axis == len(shape) - 1 and editor.shape(scale) == shape[-1:]:
        return None
    rows, columns = shape[:axis], math.prod(shape[axis:])
    dtype = editor.dtype(x) or np.dtype("float32")
    flat = editor.reshape(x, [math.prod(rows), columns])
    ones = np.ones(columns, dtype)
    epsilon = attributes.get("epsilon", 1e-5)
    normal = editor.add("RMSNormalization", flat, ones, axis=-1, epsilon=epsilon)
    return [editor.add("Mul", editor.reshape(normal, shape), scale)]


def batch_normalization(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """BatchNormalization by the batch's statistics (training), or by statistics of each element (``spatial=0``)."""
    attributes = editor.attributes(node)
    if not attributes.get("spatial", 1):
        return _normalized_elements(editor, node, attributes.get("epsilon", 1e-5))
    shape = editor.shape(node.input[0])
    if shape is not None and len(shape) == 1 and not any(node.output[1:]):  # of one channel
        column = editor.reshape(node.input[0], [-1, 1])
        normal = editor.add("BatchNormalization", column, *node.input[1:], **attributes)
        return [editor.reshape(normal, shape)]
    training = attributes.get("training_mode", 0)
    if not training:
        if any(node.output[1:]):
            editor.refuse("it has outputs of training")
        return None
    x, scale, bias, mean, variance = node.input
    rank = len(editor.dims(x) or ())
    if not rank:
        editor.refuse("the rank of its input is not known")
    if (editor.dtype(x) or np.dtype("float32")).itemsize != 4:
        editor.refuse("training mode is imported in float32 only")
    axes = [i for i in range(rank) if i != 1]
    own_mean = editor.reduce("ReduceMean", x, axes)
    centred = editor.add("Sub", x, own_mean)
    own_variance = editor.reduce("ReduceMean", editor.add("Mul", centred, centred), axes)
    inverse = _inverse_root(
        editor, own_variance, attributes.get("epsilon", 1e-5), np.dtype("float32")
    )
    per_channel = [-1, *[1] * (rank - 2)]
    y = editor.add("Mul", editor.add("Mul", centred, inverse), editor.reshape(scale, per_channel))
    y = editor.add("Add", y, editor.reshape(bias, per_channel))
    momentum = attributes.get("momentum", 0.9)

    def running(old: str, new: str) -> str:
        kept = editor.add("Mul", old, np.array(momentum, "float32"))
        part = editor.add("Mul", editor.reshape(new, [-1]), np.array(1 - momentum, "float32"))
        return editor.add("Add", kept, part)

    return [y, running(mean, own_mean), running(variance, own_variance)]


def _normalized_elements(editor: Editor, node: onnx.NodeProto, epsilon: float) -> list[str]:
    """Statistics, scales and biases of the shape of a sample, as opsets before 9 allow."""
    if any(node.output[1:]):
        editor.refuse("it has outputs of training")
    x, scale, bias, mean, variance = node.input
    dtype = editor.dtype(x) or np.dtype("float32")
    if dtype.itemsize == 2:
        x, scale, bias, mean, variance = (editor.cast(name, "float32") for name in node.input)
    inverse = _inverse_root(editor, variance, epsilon, dtype)
    normal = editor.add("Mul", editor.add("Sub", x, mean), editor.add("Mul", inverse, scale))
    y = editor.add("Add", normal, bias)
    return [editor.cast(y, dtype) if dtype.itemsize == 2 else y]


def local_response(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """LRN over an even number of channels, or of other than images: a mean over neighbours of the squares."""
    attributes, shape = editor.attributes(node), editor.shape(node.input[0])
    size = attributes["size"]
    if not 0 < size < 1 << 20:  # the padded channels are counted in int32
        editor.refuse(f"a region of {size} channels cannot be")
    if size % 2 and len(editor.dims(node.input[0]) or (0,) * 4) in (3, 4):
        return None
    if shape is None:
        editor.refuse("the shape of its input is not known: give the model static shapes")
    x, dtype = node.input[0], editor.dtype(node.input[0]) or np.dtype("float32")
    wide = editor.cast(x, "float32") if dtype.itemsize == 2 else x
    number = np.dtype("float32") if dtype.itemsize == 2 else dtype
    flat = editor.reshape(editor.add("Mul", wide, wide), [shape[0], 1, shape[1], -1])
    flat = editor.pad(flat, [0, 0, (size - 1) // 2, 0, 0, 0, size // 2, 0])
    mean = editor.reshape(editor.add("AveragePool", flat, kernel_shape=[size, 1]), shape)
    scaled = editor.add("Mul", mean, np.array(attributes.get("alpha", 1e-4), number))
    base = editor.add("Add", scaled, np.array(attributes.get("bias", 1.0), number))
    power = editor.add("Pow", base, np.array(attributes.get("beta", 0.75), number))
    y = editor.add("Div", wide, power)
    return [editor.cast(y, dtype) if dtype.itemsize == 2 else y]


def lp_normalization(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """LpNormalization: x / norm along an axis, and 0 where the norm is 0."""
    attributes = editor.attributes(node)
    x, axis = node.input[0], attributes.get("axis", -1)
    norm = editor.reduce(f"ReduceL{attributes.get('p', 2)}", x, [axis])
    zero = np.zeros((), editor.dtype(x) or "float32")
    is_zero = editor.add("Equal", norm, zero)
    safe = editor.add("Where", is_zero, zero + 1, norm)
    return [editor.add("Where", is_zero, zero, editor.add("Div", x, safe))]


def dropout(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Dropout passes its input on; the mask of inference is all true. Random ones are refused."""
    x, ratio, training = editor.operands(node, 3)
    rate = editor.value(ratio) if ratio else None
    mode = editor.value(training) if training else np.array(False)
    if (mode is None or mode.any()) and (rate is None or rate.any()):
        editor.refuse("in training mode its result is random")
    if not any(node.output[1:]):
        return [editor.add("Identity", x)]
    shape = editor.shape(x)
    if shape is None:
        editor.refuse("the shape of its mask is not known")
    editor.require_room(*shape)
    if editor.opset < 12:  # onnxruntime has zeros, onnx's reference ones
        editor.refuse(
            f"opset {editor.opset} does not say what its mask is: convert the model to 12"
        )
    return [editor.add("Identity", x), editor.store(np.ones(shape, "bool"))]
