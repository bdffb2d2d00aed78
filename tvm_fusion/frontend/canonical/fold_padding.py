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
        added = _spatial_zeros(self.producer(value.args[0], "nn.pad"), str(value.attrs.data_layout))
        while added is not None:  # auto_pad behind an explicit Pad gives two
            pad = self.producer(value.args[0])
            padding = [a + int(b) for a, b in zip(added, value.attrs.padding, strict=True)]
            value = with_attrs(with_args(value, pad.args[0], value.args[1]), padding=padding)
            added = _spatial_zeros(
                self.producer(value.args[0], "nn.pad"), str(value.attrs.data_layout)
            )
        return value


def _spatial_zeros(pad: ir.Call | None, layout: str) -> list[int] | None:
    """Return what a ``nn.pad`` adds (all befores, then all afters), or None when it is not zeros around H and W."""
    if pad is None or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != 0.0:
        return None
    width = [int(n) for n in pad.attrs.pad_width]
    if len(width) != 2 * len(layout) or min(width) < 0:
        return None
    pairs = {letter: width[2 * i : 2 * i + 2] for i, letter in enumerate(layout)}
    if any(pairs["N"]) or any(pairs["C"]):
        return None
    spatial = [pair for letter, pair in pairs.items() if letter not in "NC"]
    return [pair[0] for pair in spatial] + [pair[1] for pair in spatial]
