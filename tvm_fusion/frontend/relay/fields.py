"""Fields of the classes in a saved Relay module, and how each is written.

TVM's JSON writes numbers, truth values, dtypes, texts and node indices all as strings without a
tag: ``"groups": "1"`` is the number 1 and ``"strides": "111"`` is node 111. Only the class and the
field tell them apart, hence this table (from ``include/tvm/relay/attrs/*.h`` of TVM 0.8, 0.9 and
0.16, where a field is either a C++ scalar or a reference).

Kinds: ``r`` a node index, ``i`` an integer, ``f`` a floating number, ``b`` a truth value, ``d`` a
dtype, ``t`` a text (plain in some versions, the index of a String in others), ``-`` of no meaning
for the computation.
"""

from __future__ import annotations

#: Versions of TVM whose files are part of the tests.
KNOWN_VERSIONS = ("0.8", "0.9", "0.16")


def _fields(text: str) -> dict[str, str]:
    """Parse ``"r: strides padding; i: groups"``."""
    table = {}
    for part in text.split(";"):
        kind, _, names = part.strip().partition(":")
        table.update(dict.fromkeys(names.split(), kind))
    return table


_EXPRESSION = "-: span virtual_device_; r: _checked_type_;"

#: Fields of modules, functions, expressions and types.
STRUCTURE: dict[str, dict[str, str]] = {
    "IRModule": _fields(
        "r: functions; -: attrs global_infos global_type_var_map_ global_var_map_ source_map type_definitions"
    ),
    "GlobalVar": _fields("-: struct_info_;" + _EXPRESSION + "r: name_hint"),
    "relay.Function": _fields(_EXPRESSION + "r: params body ret_type attrs; -: type_params"),
    "relay.Var": _fields(_EXPRESSION + "r: vid type_annotation"),
    "relay.Id": _fields("r: name_hint"),
    "relay.Call": _fields("r: op args attrs span _checked_type_; -: type_args virtual_device_"),
    "relay.Tuple": _fields(_EXPRESSION + "r: fields"),
    "relay.TupleGetItem": _fields(_EXPRESSION + "r: tuple_value; i: index"),
    "relay.Let": _fields(_EXPRESSION + "r: var value body"),
    "relay.Constant": _fields(_EXPRESSION + "i: data"),
    "relay.TensorType": _fields("r: shape; d: dtype; -: span"),
    "TupleType": _fields("r: fields; -: span"),
    "DictAttrs": _fields("r: __dict__"),
    "IntImm": _fields("i: value; d: dtype; -: span"),
    "FloatImm": _fields("f: value; d: dtype; -: span"),
    "Span": _fields("r: source_name; i: line column end_line end_column"),
}

_CONVOLUTION = (
    "i: groups; d: out_dtype; t: data_layout kernel_layout out_layout;"
    "r: strides padding dilation channels kernel_size"
)
_POOLING = "r: pool_size strides padding dilation; t: layout out_layout; b: ceil_mode"
_AVERAGE = _POOLING + " count_include_pad"
_NORM = "i: axis; f: epsilon; b: center scale"
_REDUCTION = "r: axis; b: keepdims exclude"
_RESIZE = (
    "r: size roi; t: layout method coordinate_transformation_mode rounding_method;"
    "f: cubic_alpha extrapolation_value; i: cubic_exclude; d: out_dtype"
)

#: Fields of operators' attributes, by the class without ``relay.attrs.``.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "AdaptivePool1DAttrs": _fields("r: output_size; t: layout out_layout"),
    "AdaptivePool2DAttrs": _fields("r: output_size; t: layout out_layout"),
    "AdaptivePool3DAttrs": _fields("r: output_size; t: layout out_layout"),
    "ArangeAttrs": _fields("-: start stop step; d: dtype"),
    "ArgReduceAttrs": _fields(_REDUCTION + " select_last_index"),
    "ArgsortAttrs": _fields("i: axis; b: is_ascend; d: dtype"),
    "AvgPool1DAttrs": _fields(_AVERAGE),
    "AvgPool2DAttrs": _fields(_AVERAGE),
    "AvgPool3DAttrs": _fields(_AVERAGE),
    "BatchMatmulAttrs": _fields("b: transpose_a transpose_b; d: out_dtype; t: auto_scheduler_rewritten_layout;"
                                "r: meta_schedule_original_shape"),
    "BatchNormAttrs": _fields(_NORM),
    "BiasAddAttrs": _fields("i: axis"),
    "CastAttrs": _fields("d: dtype"),
    "ClipAttrs": _fields("f: a_min a_max"),
    "ConcatenateAttrs": _fields("i: axis"),
    "Conv1DAttrs": _fields(_CONVOLUTION),
    "Conv1DTransposeAttrs": _fields(_CONVOLUTION + " output_padding"),
    "Conv2DAttrs": _fields(_CONVOLUTION + " meta_schedule_original_shape; t: auto_scheduler_rewritten_layout"),
    "Conv2DTransposeAttrs": _fields(_CONVOLUTION + " output_padding"),
    "Conv3DAttrs": _fields(_CONVOLUTION + "; t: auto_scheduler_rewritten_layout"),
    "Conv3DTransposeAttrs": _fields(_CONVOLUTION + " output_padding"),
    "DenseAttrs": _fields("r: units meta_schedule_original_shape; d: out_dtype; t: auto_scheduler_rewritten_layout"),
    "DropoutAttrs": _fields("f: rate"),
    "ExpandDimsAttrs": _fields("i: axis num_newaxis"),
    "GatherAttrs": _fields("r: axis"),
    "GatherNDAttrs": _fields("r: batch_dims index_rank"),
    "GlobalPool2DAttrs": _fields("t: layout out_layout"),
    "GroupNormAttrs": _fields("i: num_groups axis; f: epsilon; b: center scale"),
    "InitOpAttrs": _fields("r: shape; d: dtype"),
    "InstanceNormAttrs": _fields(_NORM),
    "L2NormalizeAttrs": _fields("f: eps; r: axis"),
    "LRNAttrs": _fields("i: size axis; f: bias alpha beta; t: norm_region"),
    "LayerNormAttrs": _fields(_NORM),
    "LayoutTransformAttrs": _fields("t: src_layout dst_layout"),
    "LeakyReluAttrs": _fields("f: alpha"),
    "MatmulAttrs": _fields("r: units meta_schedule_original_shape; d: out_dtype; b: transpose_a transpose_b;"
                           "t: auto_scheduler_rewritten_layout"),
    "MaxPool1DAttrs": _fields(_POOLING),
    "MaxPool2DAttrs": _fields(_POOLING),
    "MaxPool3DAttrs": _fields(_POOLING),
    "MirrorPadAttrs": _fields("t: mode; r: pad_width"),
    "OneHotAttrs": _fields("i: depth axis; d: dtype"),
    "PReluAttrs": _fields("i: axis"),
    "PadAttrs": _fields("r: pad_width; t: pad_mode"),
    "ReduceAttrs": _fields(_REDUCTION),
    "RepeatAttrs": _fields("r: repeats axis"),
    "ReshapeAttrs": _fields("r: newshape; b: allowzero"),
    "ReshapeLikeAttrs": _fields("i: lhs_begin rhs_begin; r: lhs_end rhs_end"),
    "Resize2DAttrs": _fields(_RESIZE),
    "ReverseAttrs": _fields("r: axis"),
    "ScatterElementsAttrs": _fields("r: axis; t: reduction"),
    "SliceLikeAttrs": _fields("r: axes"),
    "SoftmaxAttrs": _fields("i: axis"),
    "SplitAttrs": _fields("r: indices_or_sections; i: axis"),
    "SqueezeAttrs": _fields("r: axis"),
    "StackAttrs": _fields("r: axis"),
    "StridedSliceAttrs": _fields("r: begin end strides axes; t: slice_mode"),
    "SubPixelAttrs": _fields("i: block_size; t: layout mode"),
    "TakeAttrs": _fields("r: batch_dims axis; t: mode"),
    "TileAttrs": _fields("r: reps"),
    "TopkAttrs": _fields("r: k; i: axis; b: is_ascend; t: ret_type; d: dtype"),
    "TransposeAttrs": _fields("r: axes"),
    "UpSamplingAttrs": _fields("f: scale_h scale_w; t: layout method; b: align_corners"),
    "VarianceAttrs": _fields(_REDUCTION + " unbiased"),
}  # fmt: skip

#: Expressions of Relay that have no counterpart in a compiled graph.
CONTROL_FLOW = (
    "relay.If", "relay.Match", "relay.Constructor", "relay.RefCreate", "relay.RefRead", "relay.RefWrite",
)  # fmt: skip
