"""Fold a zero padding into the convolution behind it."""

from __future__ import annotations

from ...compat import ir, tvm
from .rewrite import BindingRewriter, op_name, with_args, with_attrs

_CONVOLUTIONS = {"nn.conv1d", "nn.conv2d", "nn.conv3d"}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FoldPadding")
class FoldPadding:
    """conv(pad(x), w) -> conv(x, w) with more padding, when only spatial axes are padded, and with zeros."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) not in _CONVOLUTIONS:
            return value
        pad = self.producer(value.args[0], "nn.pad")
        if pad is None or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != 0.0:
            return value
        layout = str(value.attrs.data_layout)
        width = [int(n) for n in pad.attrs.pad_width]
        if len(width) != 2 * len(layout) or min(width) < 0:
            return value
        pairs = {letter: width[2 * i : 2 * i + 2] for i, letter in enumerate(layout)}
        if any(pairs["N"]) or any(pairs["C"]):
            return value
        spatial = [pair for letter, pair in pairs.items() if letter not in "NC"]
        added = [pair[0] for pair in spatial] + [pair[1] for pair in spatial]
        padding = [int(n) for n in value.attrs.padding]
        total = [a + b for a, b in zip(padding, added, strict=True)]
        return with_attrs(with_args(value, pad.args[0], value.args[1]), padding=total)
