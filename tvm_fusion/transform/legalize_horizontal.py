"""Definitions that lowering needs for groups of members and that Relax has no operator for.

* ``merged_conv2d`` and ``select_branch``: the convolutions of members that share their input as one
  5-D convolution with a branch dimension, and one branch of it.
* ``emit_split_store``: one block that sends the channels of a merged convolution to one tensor per
  member.
* ``emit_unstack_store``: one block that sends the members of a stacked product to one tensor each.
* ``emit_concat_stores``: a concatenation in which every member writes its own slice of the result;
  a member may be a tensor from outside, whose store is a copy.

All of them become ``call_tir``, so that FuseTIR takes them into the group's one PrimFunc.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..compat import BlockBuilder, ir, relax, s_tir, te, tirx, topi


def merged_conv2d(x: te.Tensor, weight: te.Tensor, attrs: ir.Attrs) -> te.Tensor:
    """Convolve one input with the weights of several members.

    Parameters
    ----------
    x : te.Tensor
        ``[n, c, h, w]`` or ``[n, h, w, c]``, as ``attrs.data_layout`` (NCHW or NHWC) says.
    weight : te.Tensor
        The members' weights stacked in front: ``[b, *kernel]`` with the kernel in
        ``attrs.kernel_layout``, any order of the letters O, I, H and W. I is the number of input
        channels per group.
    attrs : Attrs
        Relax attributes of one member's ``conv2d`` (strides, padding, dilation, groups, layouts).

    Returns
    -------
    te.Tensor
        float32, ``[n, b, f, y, x]`` for NCHW and ``[n, y, x, b, f]`` for NHWC. Products are summed
        in float32.

    Raises
    ------
    ValueError
        If a layout is not among those named above.
    """
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    if data_layout not in ("NCHW", "NHWC") or sorted(kernel_layout) != sorted("OIHW"):
        raise ValueError(
            f"merged_conv2d needs NCHW or NHWC data and an OIHW-like kernel, got {data_layout}, {kernel_layout}"
        )
    kernel = {axis: weight.shape[1 + kernel_layout.index(axis)] for axis in "OIHW"}
    data = {axis: x.shape[data_layout.index(axis)] for axis in "NCHW"}
    stride, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
    top, left, bottom, right = (int(p) for p in attrs.padding)
    before = {"H": top, "W": left}
    after = {"H": bottom, "W": right}
    padded = topi.nn.pad(
        x,
        [before.get(axis, 0) for axis in data_layout],
        [after.get(axis, 0) for axis in data_layout],
        name="pad_temp",
    )
    size = [
        (data[axis] + before[axis] + after[axis] - dilation[i] * (kernel[axis] - 1) - 1)
        // stride[i]
        + 1
        for i, axis in enumerate("HW")
    ]
    per_group = kernel["O"] // int(attrs.groups)
    rc, ry, rx = (
        te.reduce_axis((0, kernel[axis]), name=name)
        for axis, name in (("I", "rc"), ("H", "ry"), ("W", "rx"))
    )

    def product(n: tirx.Var, b: tirx.Var, f: tirx.Var, y: tirx.Var, col: tirx.Var) -> tirx.Expr:
        channel = rc if int(attrs.groups) == 1 else tirx.floordiv(f, per_group) * kernel["I"] + rc
        at = {
            "N": n,
            "C": channel,
            "H": y * stride[0] + ry * dilation[0],
            "W": col * stride[1] + rx * dilation[1],
        }
        tap = {"O": f, "I": rc, "H": ry, "W": rx}
        value = padded(*(at[axis] for axis in data_layout)).astype("float32")
        factor = weight(b, *(tap[axis] for axis in kernel_layout)).astype("float32")
        return te.sum(value * factor, axis=[rc, ry, rx])

    branches, filters = weight.shape[0], kernel["O"]
    if data_layout == "NCHW":
        return te.compute((data["N"], branches, filters, *size), product, name="merged_conv2d_nchw")
    return te.compute(
        (data["N"], *size, branches, filters),
        lambda n, y, col, b, f: product(n, b, f, y, col),
        name="merged_conv2d_nhwc",
    )


def merged_matmul(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Multiply one input by the weights of several members.

    Parameters
    ----------
    x : te.Tensor
        ``[..., k]``.
    weight : te.Tensor
        The members' weights stacked in front: ``[b, k, n]``.

    Returns
    -------
    te.Tensor
        float32, ``[..., b, n]``. Products are summed in float32.
    """
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def product(*place: tirx.Var) -> tirx.Expr:
        *rows, member, column = place
        factors = x(*rows, k), weight(member, k, column)
        return te.sum(tirx.Mul(*(f.astype("float32") for f in factors)), axis=k)

    shape = (*x.shape[:-1], weight.shape[0], weight.shape[2])
    return te.compute(shape, product, name="merged_matmul")


def select_branch(stacked: te.Tensor, branch: int, axis: int) -> te.Tensor:
    """Return one branch of a merged convolution.

    Parameters
    ----------
    stacked : te.Tensor
        A tensor with a branch axis.
    branch : int
        Which branch.
    axis : int
        The branch axis: 1 for ``[n, b, f, y, x]``, 3 for ``[n, y, x, b, f]``, the last but one for products.
    """
    shape = [*stacked.shape[:axis], *stacked.shape[axis + 1 :]]
    return te.compute(shape, lambda *i: stacked(*i[:axis], branch, *i[axis:]), name="select_branch")


def emit_split_store(
    builder: BlockBuilder, merged: relax.Expr, sizes: Sequence[int], axis: int
) -> relax.Expr:
    """Split a tensor by one block, so that what computes it stays in one kernel with it.

    Relax's own ``split`` becomes one block per part, each of which would be a loop nest of its own
    over the tensor.

    Parameters
    ----------
    builder : BlockBuilder
        The builder of the group's function.
    merged : relax.Expr
        A tensor of static shape.
    sizes : sequence of int
        Extents of the parts along ``axis``; they add up to the tensor's.
    axis : int
        The axis to split, possibly negative.

    Returns
    -------
    relax.Expr
        A ``call_tir`` that returns the tuple of parts; not yet bound to a variable.

    Raises
    ------
    ValueError
        If the shape is symbolic or ``sizes`` do not add up.
    """
    shape, dtype = _static_shape(merged), str(merged.ty.dtype)
    axis %= len(shape)
    if sum(sizes) != shape[axis] or not sizes:
        raise ValueError(
            f"the sizes {list(sizes)} do not add up to {shape[axis]}; give one size per part"
        )
    source = tirx.decl_buffer([_int64(extent) for extent in shape], dtype, "merged", layout=None)
    parts, stores = [], []
    loops, indices = _loops(shape)
    for number, (size, begin) in enumerate(zip(sizes, _offsets(sizes), strict=True)):
        extents = [size if i == axis else extent for i, extent in enumerate(shape)]
        part = tirx.decl_buffer(
            [_int64(extent) for extent in extents], dtype, f"part_{number}", layout=None
        )
        at = [i - begin if position == axis and begin else i for position, i in enumerate(indices)]
        parts.append(part)
        stores.append((begin + size, tirx.BufferStore(part, source[tuple(indices)], at)))
    body = stores[-1][1]
    for end, store in reversed(stores[:-1]):
        body = tirx.IfThenElse(indices[axis] < _int64(end), store, body)
    reads = [_element(source, indices)]
    writes = [_element(store.buffer, store.indices) for _, store in stores]
    nest = _nest("split_store", loops, indices, shape, reads, writes, body)
    function = _prim_func([source, *parts], nest)
    types = [relax.TensorType([int(extent) for extent in part.ty.shape], dtype) for part in parts]
    return relax.call_tir(builder.add_func(function, "split_store"), [merged], out_ty=types)


def emit_unstack_store(builder: BlockBuilder, stacked: relax.Expr) -> relax.Expr:
    """Take a tensor apart along its first axis by one block, so that what computes it stays in one kernel with it.

    Parameters
    ----------
    builder : BlockBuilder
        The builder of the group's function.
    stacked : relax.Expr
        ``[b, ...]``, a tensor of static shape.

    Returns
    -------
    relax.Expr
        A ``call_tir`` that returns the tuple of ``b`` tensors ``[...]``; not yet bound to a variable.

    Raises
    ------
    ValueError
        If the shape is symbolic.
    """
    shape, dtype = _static_shape(stacked), str(stacked.ty.dtype)
    source = tirx.decl_buffer([_int64(extent) for extent in shape], dtype, "stacked", layout=None)
    parts = [
        tirx.decl_buffer(
            [_int64(extent) for extent in shape[1:]], dtype, f"part_{number}", layout=None
        )
        for number in range(shape[0])
    ]
    loops, indices = _loops(shape)
    stores = [tirx.BufferStore(part, source[tuple(indices)], indices[1:]) for part in parts]
    body = stores[-1]
    for number, store in reversed(list(enumerate(stores[:-1]))):
        body = tirx.IfThenElse(indices[0] < _int64(number + 1), store, body)
    reads = [_element(source, indices)]
    writes = [_element(part, indices[1:]) for part in parts]
    nest = _nest("unstack_store", loops, indices, shape, reads, writes, body)
    function = _prim_func([source, *parts], nest)
    types = [relax.TensorType(shape[1:], dtype) for _ in parts]
    return relax.call_tir(builder.add_func(function, "unstack_store"), [stacked], out_ty=types)


def emit_concat_stores(
    builder: BlockBuilder, tensors: Sequence[relax.Expr], axis: int
) -> relax.Expr:
    """Concatenate by one block per tensor, each of which writes its own slice of the result.

    TVM's own ``concat`` is one block that reads every tensor; it would tie independent members
    together.

    Parameters
    ----------
    builder : BlockBuilder
        The builder of the group's function.
    tensors : sequence of relax.Expr
        Tensors of static shapes that agree except along ``axis``, of one dtype.
    axis : int
        The axis to concatenate along, possibly negative.

    Returns
    -------
    relax.Expr
        A ``call_tir``; not yet bound to a variable.

    Raises
    ------
    ValueError
        If a shape is symbolic, or the shapes or dtypes do not agree.
    """
    shapes, dtypes = (
        [_static_shape(tensor) for tensor in tensors],
        {str(tensor.ty.dtype) for tensor in tensors},
    )
    axis %= len(shapes[0])
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1 or len(dtypes) != 1:
        raise ValueError(
            f"cannot concatenate shapes {shapes} of {sorted(dtypes)} along axis {axis}"
        )
    (dtype,) = dtypes
    sizes = [shape[axis] for shape in shapes]
    total = [sum(sizes) if i == axis else extent for i, extent in enumerate(shapes[0])]
    result = tirx.decl_buffer([_int64(extent) for extent in total], dtype, "concat", layout=None)
    sources, nests = [], []
    for number, (shape, begin) in enumerate(zip(shapes, _offsets(sizes), strict=True)):
        source = tirx.decl_buffer(
            [_int64(extent) for extent in shape], dtype, f"member_{number}", layout=None
        )
        loops, indices = _loops(shape)
        at = [i + begin if position == axis and begin else i for position, i in enumerate(indices)]
        store = tirx.BufferStore(result, source[tuple(indices)], at)
        reads, writes = [_element(source, indices)], [_element(result, at)]
        sources.append(source)
        nests.append(_nest(f"concat_store_{number}", loops, indices, shape, reads, writes, store))
    function = _prim_func([*sources, result], nests[0] if len(nests) == 1 else tirx.SeqStmt(nests))
    call_type = relax.TensorType(total, dtype)
    return relax.call_tir(
        builder.add_func(function, "concat_stores"), list(tensors), out_ty=call_type
    )


def _static_shape(tensor: relax.Expr) -> list[int]:
    shape = tensor.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(
        isinstance(extent, tirx.IntImm) for extent in shape.values
    ):
        raise ValueError(
            f"{tensor.ty} has a symbolic shape; fix its dimensions or leave it ungrouped"
        )
    return [int(extent) for extent in shape.values]


def _int64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def _loops(shape: Sequence[int]) -> tuple[list[tirx.Var], list[tirx.Var]]:
    """Return loop variables and block variables for a nest over ``shape``."""
    return (
        [tirx.Var(f"i{position}", "int64") for position in range(len(shape))],
        [tirx.Var(f"v_i{position}", "int64") for position in range(len(shape))],
    )


def _element(buffer: tirx.Var, indices: Sequence[tirx.Expr]) -> ir.TensorRegion:
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(i, _int64(1)) for i in indices])


def _nest(
    name: str,
    loops: Sequence[tirx.Var],
    indices: Sequence[tirx.Var],
    shape: Sequence[int],
    reads: list,
    writes: list,
    body: tirx.Stmt,
) -> tirx.Stmt:
    """Build a complete block with spatial iterators only, and the loops around it."""
    domains = [ir.Range(_int64(0), _int64(extent)) for extent in shape]
    axes = [
        tirx.IterVar(domain, index, tirx.IterVar.DataPar)
        for domain, index in zip(domains, indices, strict=True)
    ]
    block = s_tir.SBlock(axes, reads, writes, name, body)
    nest: tirx.Stmt = s_tir.SBlockRealize(list(loops), True, block)
    for loop, extent in reversed(list(zip(loops, shape, strict=True))):
        nest = tirx.For(loop, _int64(0), _int64(extent), tirx.ForKind.SERIAL, nest)
    return nest


def _prim_func(params: list, body: tirx.Stmt) -> tirx.PrimFunc:
    root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
    return tirx.PrimFunc(params, root).with_attrs({"tirx.noalias": True, "s_tir": True})
