"""The form of a function whose products' rows are reduced, once or several times, before its outputs.

Softmax, layer and RMS norm, sums and maxima over the columns of a product: every *stage* reduces, along the last column
axis, an expression of the sums, parameters and earlier results of the row, or is such an expression that several later
stages read. The stages are read from the function, whatever operators they came from.
"""

from __future__ import annotations

import dataclasses

import tvm_ffi

from ....compat import ir, s_tir, tirx
from ...analysis import Block, Structure, axis_classes, buffer_key, nodes_of, structure
from ...steps import inline_injective, isolate_outputs
from ..contraction_form import Contraction
from ..fast_math import NARROW, dtype_of, function_of
from ..row_form import Stage, stages_of_block
from .affine import substitute, uses
from .form import Anchor, Iterator, Products
from .recognition import anchors_of, flat_stores, simple_schedule


@dataclasses.dataclass(frozen=True)
class RowProducts(Products):
    """Products whose last column axis is reduced; the other column axes only tell rows apart.

    Attributes
    ----------
    stages : tuple of Stage
        What is computed between the sums and the stores, in this order: ``"staged"`` elements and ``"reduction"``
        numbers of a row, in float32, of the iterators of rows and columns.
    """

    stages: tuple[Stage, ...] = ()

    @property
    def length(self) -> int:
        """Columns of a row that is reduced."""
        return self.columns[-1].extent

    @property
    def segments(self) -> int:
        """Rows of the output that one row operand makes."""
        return self.column_count // self.length

    @property
    def reductions(self) -> int:
        """Number of reductions."""
        return sum(stage.kind == "reduction" for stage in self.stages)


def row_products(func: tirx.PrimFunc) -> RowProducts | None:
    """Bring a function into this form; None when it has another one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function in block form.
    """
    sch = simple_schedule(func)
    if sch is None:
        return None
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or len(info.reductions) < 2:
        return None
    info = _with_shared_stages(sch, isolate_outputs(sch))
    anchors = tuple(
        b for b in info.reductions if not info.ancestors(b) & {r.name for r in info.reductions}
    )
    if info.ancestors(anchors[0]) or not all(_is_product(block) for block in anchors):
        return None
    if len(anchors) == len(info.reductions):
        return None
    return _read(sch, info, anchors)


def _with_shared_stages(sch: s_tir.Schedule, info: Structure) -> Structure:
    """Inline elementwise blocks, all but those that several stages read of a whole row."""
    # Conversions go first, so that the readers of what they convert are counted.
    kept = {b.name for b in info.blocks if not (b.is_injective and _is_conversion(sch, b))}
    info = inline_injective(sch, keep=kept)
    reduced = {block.name for block in info.reductions}
    whole = max(block.extent(range(len(block.extents))) for block in info.outputs)
    shared = {
        block.name
        for block in info.blocks
        if block.is_injective
        and not block.is_output
        and len(info.consumers(block)) > 1
        and info.ancestors(block) & reduced
        and block.extent(range(len(block.extents))) >= whole
        and not _is_conversion(sch, block)
    }
    return inline_injective(sch, keep=shared)


def _is_conversion(sch: s_tir.Schedule, block: Block) -> bool:
    """Whether a block does no more than convert what it loads."""
    body = sch.get(block.handle).body
    value = body.value if isinstance(body, tirx.BufferStore) else None
    while isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, ir.TensorLoad)


def _is_product(block: Block) -> bool:
    return len(block.reads) == 2 and len(block.writes) == 1 and not block.has_window


def _read(sch: s_tir.Schedule, info: Structure, anchors: tuple[Block, ...]) -> RowProducts | None:
    names = [block.name for block in info.blocks]
    classes = axis_classes(info, names)
    if classes is None:
        return None
    labels = _axes(info, anchors[0], classes)
    axes = [
        Iterator(tirx.Var(f"o{number}", "int32"), extent)
        for number, extent in enumerate(labels.values())
    ]
    places = {label: number for number, label in enumerate(labels)}
    described = _products(sch, info, anchors, axes, places, classes)
    if described is None:
        return None
    found, (batch, rows, columns) = described
    if not columns or columns[-1].extent < 2 or not columns[-1].var.same_as(axes[-1].var):
        return None
    stages: list[Stage] = []
    stores = []
    for block in info.blocks:
        if block.name in {anchor.name for anchor in anchors}:
            continue
        at = _iterators(sch, block, axes, places, classes)
        if at is None or not _walks(block, classes, places, axes):
            return None
        if block.is_output:
            named = {i.var: at[i.var.__chandle__()] for i in sch.get(block.handle).iter_vars}
            made = flat_stores(substitute(sch.get(block.handle).body, named))
            stores += made or []
        else:
            made = stages_of_block(sch.get(block.handle), block, at, True)
            stages += made or []
        if made is None:
            return None
    params = tuple(sch.mod["main"].params)
    form = RowProducts(params, batch, rows, columns, found, tuple(stores), stages=tuple(stages))
    return _widened(form) if _is_supported(form) else None


def _axes(info: Structure, anchor: Block, classes: dict) -> dict[int, int]:
    """Extents of the axes by label, in the order of the first anchor's iterators."""
    return {
        classes[anchor.name, number]: anchor.extents[number]
        for number in anchor.spatial
        if anchor.extents[number] != 1
    }


def _products(
    sch: s_tir.Schedule,
    info: Structure,
    anchors: tuple[Block, ...],
    axes: list[Iterator],
    places: dict[int, int],
    classes: dict,
) -> tuple[tuple[Anchor, ...], tuple] | None:
    """The anchors, and the axes sorted into batch, rows and columns."""
    follows: tuple[dict[str, int], ...] = tuple({} for _ in axes)
    for block in anchors:
        for number in block.spatial:
            place = places.get(classes[block.name, number])
            if block.extents[number] != 1 and place is None:
                return None
            if block.extents[number] != 1:
                follows[place][block.name] = number
    if any(len(numbers) != len(anchors) for numbers in follows):
        return None
    found = anchors_of(sch, Contraction(info, anchors, info.outputs, follows), axes)
    return None if found is None or any(a.copies for a in found[0]) else found


def _iterators(
    sch: s_tir.Schedule, block: Block, axes: list[Iterator], places: dict[int, int], classes: dict
) -> dict[int, tirx.PrimExpr] | None:
    """What stands for each iterator of a block, by its handle; None where one walks no axis."""
    found = {}
    for number, iter_var in enumerate(sch.get(block.handle).iter_vars):
        place = places.get(classes[block.name, number])
        extent = block.extents[number]
        if extent == 1:
            found[iter_var.var.__chandle__()] = tirx.IntImm("int32", 0)
        elif place is None or axes[place].extent != extent:
            return None
        else:
            found[iter_var.var.__chandle__()] = axes[place].var
    return found


def _walks(block: Block, classes: dict, places: dict[int, int], axes: list[Iterator]) -> bool:
    """Whether a block walks every axis, and reduces none but the last."""
    wide = [i for i, extent in enumerate(block.extents) if extent != 1]
    numbers = {places.get(classes[block.name, i]): i for i in wide}
    last = len(axes) - 1
    missing = set(range(len(axes))) - set(numbers)
    if block.is_reduction:
        return not missing and [numbers[last]] == [i for i in block.reduced if i in wide]
    return missing <= ({last} if block.is_output else set())


def _is_supported(form: RowProducts) -> bool:
    """Whether what stages hand on is read at its own place, and everything is a number in float32."""
    anchors = {buffer_key(anchor.buffer): anchor.indices for anchor in form.anchors}
    written = dict(anchors)
    values = [(stage.value, stage) for stage in form.stages]
    for value, stage in [*values, *((store.value, None) for store in form.stores)]:
        if any(function_of(call) == "if_then_else" for call in nodes_of(value, ir.Call)):
            return False
        for load in nodes_of(value, ir.TensorLoad):
            if any(nodes_of(index, ir.TensorLoad) for index in load.indices):
                return False
            own = written.get(buffer_key(load.source))
            if own is not None and not _same(own, load.indices):
                return False
            if own is None and not any(load.source.same_as(param) for param in form.params):
                return False
        if stage is None:
            continue
        # A narrow sum would have to be rounded after every addition; the largest of narrow values is one of them.
        exact = stage.kind == "staged" or stage.combine in (tirx.Max, tirx.Min)
        if str(stage.buffer.dtype) not in (("float32", *NARROW) if exact else ("float32",)):
            return False
        written[buffer_key(stage.buffer)] = stage.indices
    written_params = [store.buffer for store in form.stores]
    read = [load.source for value, _ in values for load in nodes_of(value, ir.TensorLoad)]
    last = form.columns[-1].var
    for store in form.stores:
        if any(uses(condition, last) for condition in store.conditions):
            return False
    return not any(a.same_as(b) for a in written_params for b in read)


def _same(one, other) -> bool:
    return len(one) == len(other) and all(
        tvm_ffi.structural_equal(a, b, map_free_vars=False) for a, b in zip(one, other, strict=True)
    )


def _widened(form: RowProducts) -> RowProducts:
    """Keep staged elements of narrow types in float32, without converting them there and back."""
    twins = {
        buffer_key(stage.buffer): tirx.decl_buffer(
            [int(extent) for extent in stage.buffer.shape], "float32", name=stage.buffer.name
        )
        for stage in form.stages
        if stage.kind == "staged" and str(stage.buffer.dtype) in NARROW
    }

    def twin(load) -> tirx.PrimExpr | None:
        found = twins.get(buffer_key(load.source)) if isinstance(load, ir.TensorLoad) else None
        return None if found is None else tirx.BufferLoad(found, list(load.indices))

    def cast(node: tirx.Cast):
        found = twin(node.value) if dtype_of(node) == "float32" else None
        return node if found is None else found

    def load(node: ir.TensorLoad):
        found = twin(node)
        return node if found is None else tirx.Cast(dtype_of(node), found)

    def rewritten(value):
        value = tvm_ffi.structural_map(value, [(tirx.Cast, cast)], order="pre")
        return tvm_ffi.structural_map(value, [(ir.TensorLoad, load)])

    stages = []
    for stage in form.stages:
        value, buffer = rewritten(stage.value), twins.get(buffer_key(stage.buffer), stage.buffer)
        if buffer is not stage.buffer:
            value = tirx.Cast("float32", value)
        stages.append(dataclasses.replace(stage, value=value, buffer=buffer))
    stores = [dataclasses.replace(s, value=rewritten(s.value)) for s in form.stores]
    return dataclasses.replace(form, stages=tuple(stages), stores=tuple(stores))
