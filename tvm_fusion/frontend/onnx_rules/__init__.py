"""Rules that replace nodes which TVM 0.27 would import wrongly or not at all, by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..onnx_editor import Rule
from . import (
    arithmetic,
    convolution,
    elementwise,
    indexing,
    normalization,
    pooling,
    quantization,
    recurrent,
    resizing,
    spectral,
)

__all__ = ["RULES"]

_REDUCTIONS = ("ReduceL1", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare")

#: Operators on float16 and bfloat16 that TVM imports or compiles in float32 only.
_WIDE_ONLY = (
    "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Elu", "Gelu", "Hardmax",
    "Selu", "Sinh",
)  # fmt: skip

#: Rules by operator; the first that returns something counts.
RULES: Mapping[str, Sequence[Rule]] = {
    **{name: (arithmetic.reduce_nothing, arithmetic.reduce_no_axes) for name in _REDUCTIONS},
    **{
        name: (arithmetic.reduce_nothing, arithmetic.reduce_no_axes, arithmetic.reduce_in_floats)
        for name in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
    },
    **{name: (elementwise.in_float32,) for name in _WIDE_ONLY},
    **{name: (elementwise.in_float32, elementwise.exponential) for name in ("Elu", "Selu")},
    **{name: (elementwise.of_itself,) for name in ("GreaterOrEqual", "LessOrEqual", "Sub")},
    "AveragePool": (pooling.average_pool,),
    "BatchNormalization": (normalization.batch_normalization,),
    "BitShift": (elementwise.bit_shift,),
    "Celu": (elementwise.celu,),
    "Col2Im": (indexing.column_to_image,),
    "Compress": (indexing.compress,),
    "Conv": (convolution.conv,),
    "ConvInteger": (convolution.integer_conv,),
    "ConvTranspose": (convolution.conv_transpose,),
    "CumProd": (indexing.cumulative_product,),
    "CumSum": (indexing.cumulative_sum,),
    "DFT": (spectral.discrete_fourier,),
    "DequantizeLinear": (quantization.dequantize,),
    "Div": (elementwise.divided_by_zero, elementwise.divided_zero),
    "Dropout": (normalization.dropout,),
    "DynamicQuantizeLinear": (quantization.dynamic_quantize,),
    "Equal": (elementwise.equal_truths, elementwise.of_itself),
    "EyeLike": (indexing.eye_like,),
    "GRU": (recurrent.unroll,),
    "Gemm": (arithmetic.gemm,),
    "GridSample": (indexing.grid_sample,),
    "IsInf": (elementwise.is_inf,),
    "LRN": (normalization.local_response,),
    "LSTM": (recurrent.unroll,),
    "LayerNormalization": (normalization.layer_normalization,),
    "LpNormalization": (normalization.lp_normalization,),
    "LpPool": (pooling.lp_pool,),
    "MatMul": (arithmetic.matmul,),
    "MatMulInteger": (quantization.integer_matmul,),
    "Max": (elementwise.extreme,),
    "MaxPool": (pooling.max_pool,),
    "MaxUnpool": (pooling.max_unpool,),
    "Min": (elementwise.extreme,),
    "Mish": (elementwise.mish,),
    "Mod": (elementwise.mod,),
    "Mul": (elementwise.times_zero,),
    "Neg": (elementwise.negative,),
    "NonMaxSuppression": (indexing.run_time_sizes,),
    "NonZero": (indexing.run_time_sizes,),
    "OneHot": (indexing.one_hot,),
    "PRelu": (arithmetic.prelu,),
    "Pad": (indexing.pad,),
    "Pow": (arithmetic.power,),
    "QLinearConv": (convolution.quantized_conv,),
    "QLinearMatMul": (quantization.quantized_matmul,),
    "QuantizeLinear": (quantization.quantize,),
    "RMSNormalization": (normalization.rms_normalization,),
    "RNN": (recurrent.unroll,),
    "ReduceLogSumExp": (
        arithmetic.reduce_nothing,
        arithmetic.reduce_no_axes,
        arithmetic.reduce_in_floats,
        arithmetic.log_sum_exp,
    ),
    "ReduceMean": (
        arithmetic.reduce_nothing,
        arithmetic.reduce_no_axes,
        arithmetic.reduce_mean_of_integers,
    ),
    "ReduceMax": (arithmetic.reduce_nothing, arithmetic.reduce_no_axes, arithmetic.reduce_bool),
    "ReduceMin": (arithmetic.reduce_nothing, arithmetic.reduce_no_axes, arithmetic.reduce_bool),
    "Reshape": (indexing.reshape,),
    "Resize": (resizing.resize,),
    "ReverseSequence": (indexing.reverse_sequence,),
    "RoiAlign": (indexing.roi_align,),
    "STFT": (spectral.short_time_fourier,),
    "Scatter": (indexing.scatter,),
    "ScatterND": (indexing.scatter_nd,),
    "Shrink": (elementwise.shrink,),
    "Sign": (elementwise.sign,),
    "Slice": (indexing.slice_attributes,),
    "Softplus": (elementwise.softplus,),
    "SpaceToDepth": (indexing.space_to_depth,),
    "Split": (indexing.split,),
    "TensorScatter": (indexing.tensor_scatter,),
    "ThresholdedRelu": (elementwise.thresholded_relu,),
    "TopK": (indexing.top_k,),
    "Unique": (indexing.run_time_sizes,),
    "Unsqueeze": (indexing.unsqueeze,),
    "Upsample": (resizing.upsample,),
}
