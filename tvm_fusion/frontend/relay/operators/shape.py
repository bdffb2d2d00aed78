"""Operators that arrange elements anew: reshapes, transposes, concatenations, splits, paddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....compat import ir, relax
from ..graph import TensorType
from ..site import Site
from .registry import operator


@operator("reshape")
def reshape(site: Site, x: ir.Expr) -> ir.Expr:
    """A reshape to the sizes that type inference found, else to those that the codes mean."""
    declared = site.node.type
    if isinstance(declared, TensorType) and None not in declared.shape:
        return site.reshape(x, [n for n in declared.shape if n is not None])
    wanted = site.integers("newshape")
    if site.flag("allowzero") and 0 in wanted:
        site.refuse("it makes an empty tensor")
    return site.reshape(x, _decoded(site, site.shape(x), wanted))


def _decoded(site: Site, shape: Sequence[int], codes: Sequence[int]) -> list[int]:
    """Return the sizes that Relay's codes mean (``relay.reshape``): 0 keeps a size, -1 is what is left,
    -2 keeps all the rest, -3 joins two, -4 splits one into the two that follow."""
    left, out, codes = list(shape), [], list(codes)

    def take() -> int:
        if not left:
            site.damaged(f"newshape asks for more dimensions than {tuple(shape)} has")
        return left.pop(0)

    while codes:
        code = codes.pop(0)
        if code == 0:
            out.append(take())
        elif code == -2:
            out += left
            left = []
        elif code == -3:
            out.append(take() * take())
        elif code == -4:
            if len(codes) < 2:
                site.damaged("newshape splits a dimension into nothing")
            whole, first, second = take(), codes.pop(0), codes.pop(0)
            first = whole // second if first == -1 and second else first
            second = whole // first if second == -1 and first else second
            out += [first, second]
        elif code >= -1:
            out.append(code)
            if left:
                left.pop(0)
        else:
            site.damaged(f"newshape has the code {code}")
    if out.count(-1) > 1:
        site.damaged("newshape leaves two dimensions open")
    known = math.prod(n for n in out if n != -1)
    return [math.prod(shape) // known if n == -1 and known else n for n in out]


@operator("reshape_like")
def reshape_like(site: Site, x: ir.Expr, like: ir.Expr) -> ir.Expr:
    """A reshape of a range of dimensions to those of another tensor."""
    own, other = site.shape(x), site.shape(like)

    def bounds(prefix: str, rank: int) -> tuple[int, int]:
        begin, end = site.integer(f"{prefix}_begin", 0), site.integer(f"{prefix}_end", None)
        begin = begin + rank if begin < 0 else begin
        end = rank if end is None else end + rank if end < 0 else end
        if not 0 <= begin <= end <= rank:
            site.damaged(f"dimensions {begin} to {end} do not exist in {rank}")
        return begin, end

    begin, end = bounds("lhs", len(own))
    first, last = bounds("rhs", len(other))
    return site.reshape(x, [*own[:begin], *other[first:last], *own[end:]])


@operator("nn.batch_flatten")
def batch_flatten(site: Site, x: ir.Expr) -> ir.Expr:
    """All dimensions but the first in one."""
    if site.rank(x) == 0:
        site.damaged("its operand is one number")
    first, *rest = site.shape(x)
    return site.reshape(x, [first, math.prod(rest)])


@operator("expand_dims")
def expand_dims(site: Site, x: ir.Expr) -> ir.Expr:
    """New dimensions of one element."""
    rank, count = site.rank(x), site.integer("num_newaxis", 1, low=0, high=8)
    axis = site.integer("axis")
    if not -rank - 1 <= axis <= rank:
        site.damaged(f"axis {axis} does not exist in {rank} dimensions")
    axis = axis + rank + 1 if axis < 0 else axis
    shape = list(site.shape(x))
    return site.reshape(x, [*shape[:axis], *[1] * count, *shape[axis:]])


@operator("squeeze")
def squeeze(site: Site, x: ir.Expr) -> ir.Expr:
    """Dimensions of one element left out."""
    shape, named = site.shape(x), site.integers("axis", None)
    axes = range(len(shape)) if named is None else [site.axis_of(a, len(shape)) for a in named]
    if named is not None and any(shape[axis] != 1 for axis in axes):
        site.damaged(f"axes {named} of {shape} have more than one element")
    return site.reshape(x, [n for i, n in enumerate(shape) if n != 1 or i not in axes])


@operator("transpose")
def transpose(site: Site, x: ir.Expr) -> ir.Expr:
    """Another order of axes; reversed where none is given."""
    rank = site.rank(x)
    axes = site.integers("axes", None)
    if not axes:
        return site.permute(x, list(range(rank))[::-1])
    return site.permute(x, [site.axis_of(axis, rank) for axis in axes])


@operator("layout_transform")
def layout_transform(site: Site, x: ir.Expr) -> ir.Expr:
    """Another layout of the same letters."""
    source, wanted = site.text("src_layout"), site.text("dst_layout")
    if not (source.isalpha() and source.isupper() and wanted.isalpha() and wanted.isupper()):
        site.refuse(
            f"it goes from {source!r} to {wanted!r}: only layouts without blocks can be imported"
        )
    return site.relayout(x, source, wanted)


def _check_alike(site: Site, parts: Sequence[ir.Expr], axis: int | None) -> None:
    """Refuse tensors that differ in more than the sizes of one axis."""
    if not parts:
        site.damaged("it has no operands")
    first = site.shape(parts[0])
    for part in parts:
        shape = site.shape(part)
        same = len(shape) == len(first) and all(
            i == axis or n == m for i, (n, m) in enumerate(zip(shape, first, strict=True))
        )
        if not same or str(part.ty.dtype) != str(parts[0].ty.dtype):
            site.damaged(
                f"{parts[0].ty.dtype} of shape {first} and {part.ty.dtype} of shape {shape} cannot be joined"
            )


@operator("concatenate", takes_tuple=True)
def concatenate(site: Site, parts: Sequence[ir.Expr]) -> ir.Expr:
    """Tensors one behind the other along an axis."""
    if not parts:
        site.damaged("it has no operands")
    axis = site.axis("axis", site.rank(parts[0]), 0)
    _check_alike(site, parts, axis)
    return parts[0] if len(parts) == 1 else site.emit(relax.op.concat(list(parts), axis))


@operator("stack", takes_tuple=True)
def stack(site: Site, parts: Sequence[ir.Expr]) -> ir.Expr:
    """Tensors one behind the other along a new axis."""
    _check_alike(site, parts, None)
    shape = list(site.shape(parts[0]))
    axis = site.axis("axis", len(shape) + 1, 0)
    shape.insert(axis, 1)
    parts = [site.reshape(part, shape) for part in parts]
    return parts[0] if len(parts) == 1 else site.emit(relax.op.concat(list(parts), axis))


@operator("split")
def split(site: Site, x: ir.Expr) -> tuple[ir.Expr, ...]:
    """Equal parts along an axis, or parts between given positions."""
    axis = site.axis("axis", site.rank(x), 0)
    size, sections = site.shape(x)[axis], site.attr("indices_or_sections")
    if isinstance(sections, list):
        places = site.integers("indices_or_sections", low=1)
        if any(a >= b for a, b in zip([0, *places], [*places, size], strict=True)):
            site.refuse(f"it splits {size} elements at {places}, which makes an empty tensor")
        count, how = len(places) + 1, places
    else:
        count = how = site.integer("indices_or_sections", low=1)
        if size % count:
            site.damaged(f"{size} elements are not divisible into {count} parts")
    if count == 1:
        return (x,)
    parts = site.emit(relax.op.split(x, how, axis))
    return tuple(site.emit(relax.TupleGetItem(parts, i)) for i in range(count))


def _pad_width(site: Site, rank: int) -> list[list[int]]:
    """Return the padding before and after each axis."""
    pairs = site.attr("pad_width")
    if not isinstance(pairs, list) or len(pairs) != rank:
        site.damaged(f"pad_width does not have two numbers for each of {rank} dimensions")
    for pair in pairs:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(n, int) and -(1 << 20) <= n <= 1 << 20 for n in pair)
        ):
            site.damaged(f"pad_width has {pair!r} instead of two numbers")
        if min(pair) < 0:
            site.refuse("it pads by a negative number: use strided_slice")
    return pairs


@operator("nn.pad")
def pad(site: Site, x: ir.Expr, value: ir.Expr) -> ir.Expr:
    """Padding by a number, or by what stands at the edges."""
    pairs = _pad_width(site, site.rank(x))
    mode = site.text("pad_mode", "constant", "edge", "reflect", default="constant")
    flat = [n for pair in pairs for n in pair]
    if mode == "constant":
        if "float" not in str(x.ty.dtype):
            site.scalar(value, "value")
        number = float(site.scalar(value, "value"))
        return site.emit(relax.op.nn.pad(x, flat, pad_mode="constant", pad_value=number))
    if mode == "reflect":
        _check_reflection(site, x, pairs, 1)
    mode = "replicate" if mode == "edge" else mode
    return site.emit(relax.op.nn.pad(x, flat, pad_mode=mode))


def _check_reflection(site: Site, x: ir.Expr, pairs: Sequence[Sequence[int]], short: int) -> None:
    for size, pair in zip(site.shape(x), pairs, strict=True):
        if max(pair) > size - short:
            site.damaged(f"{size} elements cannot be mirrored by {max(pair)}")


@operator("nn.mirror_pad")
def mirror_pad(site: Site, x: ir.Expr) -> ir.Expr:
    """Padding by a mirror image: without the edge (REFLECT), or with it (SYMMETRIC)."""
    pairs = _pad_width(site, site.rank(x))
    mode = site.text("mode", "REFLECT", "SYMMETRIC", default="SYMMETRIC")
    if mode == "REFLECT":
        _check_reflection(site, x, pairs, 1)
        flat = [n for pair in pairs for n in pair]
        return site.emit(relax.op.nn.pad(x, flat, pad_mode="reflect"))
    _check_reflection(site, x, pairs, 0)
    for axis, (before, after) in enumerate(pairs):
        size = site.shape(x)[axis]
        parts = [x]
        if before:
            parts.insert(0, site.emit(relax.op.flip(_range(site, x, axis, 0, before), axis)))
        if after:
            parts.append(site.emit(relax.op.flip(_range(site, x, axis, size - after, size), axis)))
        x = x if len(parts) == 1 else site.emit(relax.op.concat(parts, axis))
    return x


def _range(site: Site, x: ir.Expr, axis: int, begin: int, end: int) -> ir.Expr:
    return site.emit(relax.op.strided_slice(x, [axis], [begin], [end], [1]))


@operator("tile")
def tile(site: Site, x: ir.Expr) -> ir.Expr:
    """A tensor repeated as a whole along each axis."""
    repeats = site.integers("reps", low=1, high=1 << 24)
    if all(n == 1 for n in repeats) and len(repeats) <= site.rank(x):
        return x
    return site.emit(relax.op.tile(x, repeats))


@operator("repeat")
def repeat(site: Site, x: ir.Expr) -> ir.Expr:
    """Each element repeated along an axis."""
    count = site.integer("repeats", low=1, high=1 << 24)
    axis = site.axis("axis", site.rank(x), 0)
    return x if count == 1 else site.emit(relax.op.repeat(x, count, axis))


@operator("reverse")
def reverse(site: Site, x: ir.Expr) -> ir.Expr:
    """Elements of an axis in reverse order."""
    return site.emit(relax.op.flip(x, site.axis("axis", site.rank(x))))


@operator("nn.depth_to_space", "nn.space_to_depth")
def sub_pixel(site: Site, x: ir.Expr) -> ir.Expr:
    """Channels moved into space or back, in blocks: reshapes and a transpose."""
    block = site.integer("block_size", low=1, high=1 << 16)
    given = site.text("layout", "NCHW", "NHWC", default="NCHW")
    x = site.relayout(x, given, "NCHW")
    n, c, h, w = site.shape(x)
    if site.node.op == "nn.depth_to_space":
        if c % (block * block):
            site.damaged(f"{c} channels are not divisible into blocks of {block} x {block}")
        c //= block * block
        if site.text("mode", "DCR", "CDR", "CRD", default="DCR") == "DCR":
            x = site.permute(site.reshape(x, [n, block, block, c, h, w]), [0, 3, 4, 1, 5, 2])
        else:
            x = site.permute(site.reshape(x, [n, c, block, block, h, w]), [0, 1, 4, 2, 5, 3])
        return site.relayout(site.reshape(x, [n, c, h * block, w * block]), "NCHW", given)
    if h % block or w % block:
        site.damaged(f"a map of {h} x {w} is not divisible into blocks of {block} x {block}")
    x = site.reshape(x, [n, c, h // block, block, w // block, block])
    x = site.permute(x, [0, 3, 5, 1, 2, 4])
    x = site.reshape(x, [n, c * block * block, h // block, w // block])
    return site.relayout(x, "NCHW", given)
