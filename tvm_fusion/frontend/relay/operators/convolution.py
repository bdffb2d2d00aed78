"""Convolutions, plain and transposed.

Relax (and what canonicalisation and the templates know) has kernels as OIHW beside NCHW, and OHWI
beside NHWC; other orders of axes are transposed.
"""

from __future__ import annotations

import math
from typing import Any

from ....compat import ir, relax
from ..site import Site
from .registry import operator

#: Letters of the axes of space.
_SPACE = {1: "W", 2: "HW", 3: "DHW"}


def _padding(site: Site, rank: int) -> list[int]:
    """Return the padding before, then after each axis: Relay allows one, ``rank`` and ``2 * rank`` numbers."""
    pads = site.integers("padding", [0], low=0, high=1 << 20)
    if len(pads) == 1:
        return pads * (2 * rank)
    if len(pads) == rank:
        return pads * 2
    if len(pads) != 2 * rank:
        site.damaged(f"padding has {len(pads)} numbers instead of {rank} or {2 * rank}")
    return pads


def _common(site: Site, rank: int) -> dict[str, Any]:
    return {
        "strides": site.integers("strides", [1] * rank, count=rank, low=1, high=1 << 20),
        "padding": _padding(site, rank),
        "dilation": site.integers("dilation", [1] * rank, count=rank, low=1, high=1 << 20),
        "groups": site.integer("groups", 1, low=1),
    }


def _check_dtypes(site: Site, data: ir.Expr, weight: ir.Expr) -> None:
    if str(data.ty.dtype) != str(weight.ty.dtype):
        site.refuse(
            f"data of dtype {data.ty.dtype} with a kernel of {weight.ty.dtype}: cast one of them"
        )
    if str(data.ty.dtype) == "bool":
        site.refuse("its operands are of dtype bool: cast them first")


def _back(site: Site, result: ir.Expr, layout: str, given: str) -> ir.Expr:
    """Return a result in the layout that the module asks for."""
    wanted = site.text("out_layout") or given
    return site.relayout(result, layout, wanted)


@operator("nn.conv1d", "nn.conv2d", "nn.conv3d")
def convolution(site: Site, data: ir.Expr, weight: ir.Expr) -> ir.Expr:
    """A convolution of one to three axes of space."""
    rank = int(site.node.op[-2])
    space = _SPACE[rank]
    given = site.text("data_layout", default=f"NC{space}")
    kernel = site.text("kernel_layout", default=f"OI{space}")
    _check_dtypes(site, data, weight)
    last = given == f"N{space}C" and rank == 2
    layout, kernel_layout = (given, f"O{space}I") if last else (f"NC{space}", f"OI{space}")
    data = site.relayout(data, given, layout)
    common = _common(site, rank)
    # Kernels of depthwise convolutions come as HWOI with O = 1 channel of each group, I = groups.
    weight = _depthwise(site, weight, kernel, kernel_layout, common["groups"])
    channels = site.shape(data)[layout.index("C")]
    sizes = dict(zip(kernel_layout, site.shape(weight), strict=True))
    groups = common["groups"]
    if channels != sizes["I"] * groups or sizes["O"] % groups:
        site.damaged(
            f"a kernel of {sizes['O']} x {sizes['I']} channels in {groups} groups does not fit {channels} channels"
        )
    function = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[rank - 1]
    result = function(
        data, weight, **common, data_layout=layout, kernel_layout=kernel_layout,
        out_dtype=site.dtype("out_dtype", str(data.ty.dtype)),
    )  # fmt: skip
    return _back(site, site.emit(result), layout, given)


def _depthwise(site: Site, weight: ir.Expr, kernel: str, wanted: str, groups: int) -> ir.Expr:
    """Return a kernel in another order of axes.

    With ``HWOI`` Relay means a depthwise kernel whose O is the channels of the input and whose I
    their multiple: O and I together are the output channels, and each reads one input.
    """
    if groups > 1 and kernel == "HWOI" and site.shape(weight)[2:3] == (groups,):
        weight = site.relayout(weight, kernel, "OIHW")
        o, i, h, w = site.shape(weight)
        return site.relayout(site.reshape(weight, [o * i, 1, h, w]), "OIHW", wanted)
    return site.relayout(weight, kernel, wanted)


@operator("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
def transposed_convolution(site: Site, data: ir.Expr, weight: ir.Expr) -> ir.Expr:
    """A transposed convolution; its kernel has the input channels first."""
    rank = int(site.node.op.removesuffix("_transpose")[-2])
    space = _SPACE[rank]
    given = site.text("data_layout", default=f"NC{space}")
    kernel = site.text("kernel_layout", default=f"IO{space}")
    if kernel == f"OI{space}" and _means_input_first(site, weight, data, given):
        kernel = f"IO{space}"
    _check_dtypes(site, data, weight)
    layout, kernel_layout = f"NC{space}", f"IO{space}"
    data, weight = site.relayout(data, given, layout), site.relayout(weight, kernel, kernel_layout)
    common = _common(site, rank)
    output_padding = site.integers("output_padding", [0] * rank, count=rank, low=0, high=1 << 20)
    if any(o >= s for o, s in zip(output_padding, common["strides"], strict=True)):
        site.damaged(
            f"output_padding {output_padding} is not below the strides {common['strides']}"
        )
    channels = site.shape(data)[1]
    if site.shape(weight)[0] != channels or channels % common["groups"]:
        site.damaged(
            f"a kernel of {site.shape(weight)[0]} input channels in {common['groups']} groups does not fit {channels} "
            "channels"
        )
    if any(d != 1 for d in common["dilation"]):
        site.refuse("it is dilated, which TVM does not compute")
    if rank == 3 and common["groups"] != 1:
        site.refuse("it has groups, which TVM does not compute for three axes")
    _check_transposed_size(site, data, weight, common)
    function = (
        relax.op.nn.conv1d_transpose, relax.op.nn.conv2d_transpose, relax.op.nn.conv3d_transpose,
    )[rank - 1]  # fmt: skip
    result = function(
        data, weight, **common, output_padding=output_padding, data_layout=layout, kernel_layout=kernel_layout,
        out_dtype=site.dtype("out_dtype", str(data.ty.dtype)),
    )  # fmt: skip
    return _back(site, site.emit(result), layout, given)


def _means_input_first(site: Site, weight: ir.Expr, data: ir.Expr, given: str) -> bool:
    """Whether ``OIHW`` names a kernel with the input channels first, as TVM 0.8 did.

    TVM 0.9 names it ``IOHW``, but goes on calling those of one and three axes ``OIW`` and ``OIDHW``.
    """
    rank = len(given) - 2
    if not site.version.startswith("0.8" if rank == 2 else ("0.8", "0.9")):
        return False
    site.rank(data, rank + 2)
    site.rank(weight, rank + 2)
    return site.shape(weight)[0] == site.shape(data)[given.index("C")]


def _check_transposed_size(
    site: Site, data: ir.Expr, weight: ir.Expr, common: dict[str, Any]
) -> None:
    """Refuse sizes that TVM would multiply past its integers."""
    shape, kernel = site.shape(data)[2:], site.shape(weight)[2:]
    spread = (n * s + k for n, s, k in zip(shape, common["strides"], kernel, strict=True))
    if math.prod(spread) > 1 << 31:
        site.damaged("its result has more than 2**31 elements in a channel")
