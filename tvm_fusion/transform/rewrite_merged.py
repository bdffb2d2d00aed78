"""Members that share their input: one anchor with added, concatenated or stacked weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..compat import Constant, ir, relax
from ..errors import LoweringError
from ..graph.dataflow import Operator
from ..strategies.branches import Branch
from ..strategies.growth import POINTWISE
from ..strategies.horizontal import same_structure
from ..strategies.padding import CommonKernel, pad_offsets
from .legalize import with_fields
from .legalize_horizontal import emit_split_store, merged_conv2d, merged_matmul, select_branch
from .rewrite_members import GroupBody, as_float, make_constant
from .rewrite_stacked_rows import emit_stacked_rows


@dataclasses.dataclass(frozen=True)
class Anchors:
    """Anchors of one input that become one.

    Attributes
    ----------
    heads : tuple of str
        Operator names.
    call : relax.Call
        The call of one of them.
    attrs : Attrs
        The attributes that the one anchor gets.
    weights : tuple of ndarray
        float64, one per head, of one kernel size.
    """

    heads: tuple[str, ...]
    call: relax.Call
    attrs: ir.Attrs | None
    weights: tuple[np.ndarray, ...]

    @property
    def dtype(self) -> str:
        """Element type of the weights."""
        return str(self.call.args[1].ty.dtype)


def _shared_anchors(group: GroupBody, branches: Sequence[Branch]) -> Anchors:
    """Check that the heads of branches can be one anchor, and bring their weights to one kernel size."""
    heads = tuple(b.head for b in branches)
    operators = [group.graph.by_name[h] for h in heads]
    calls = [group.calls[h] for h in heads]
    first = operators[0]
    if len(heads) < 2 or any(o.op != first.op or o.pattern != "anchor" for o in operators):
        raise LoweringError("the members have no anchors of one type to merge; leave them apart")
    if len({o.inputs[0] for o in operators}) > 1:
        raise LoweringError("the members read different tensors; their anchors cannot be one")
    if not all(isinstance(c.args[1], Constant) for c in calls):
        raise LoweringError("a member's weight is not known at compile time; leave them apart")
    attrs, weights = calls[0].attrs, [as_float(c.args[1]) for c in calls]
    if group.options.get("balance") == "pad":
        common = pad_offsets(group.graph, operators)
        if common is None:
            raise LoweringError(
                "the members' kernels cannot be zero-padded to one: a tap would fall beside"
            )
        if not common.is_exact:
            attrs = with_fields(attrs, padding=common.padding, dilation=common.dilation)
            weights = _pad_weights(operators[0], weights, common)
    elif any(dict(o.attrs) != dict(first.attrs) for o in operators):
        raise LoweringError("the members' anchors differ in their attributes; leave them apart")
    return Anchors(heads, calls[0], attrs, tuple(weights))


def _pad_weights(
    head: Operator, weights: Sequence[np.ndarray], common: CommonKernel
) -> list[np.ndarray]:
    """Put each kernel's taps at their places in the common kernel."""
    layout = str(head.attrs["kernel_layout"])
    axes = [i for i, letter in enumerate(layout) if letter not in "OI"]
    padded = []
    for weight, offsets, steps in zip(weights, common.offsets, common.steps, strict=True):
        shape, place = list(weight.shape), [slice(None)] * weight.ndim
        for axis, size, offset, step in zip(axes, common.size, offsets, steps, strict=True):
            shape[axis] = size
            place[axis] = slice(offset, offset + (weight.shape[axis] - 1) * step + 1, step)
        wide = np.zeros(shape)
        wide[tuple(place)] = weight
        padded.append(wide)
    return padded


def _replay_before(group: GroupBody, heads: Sequence[str]) -> list[str]:
    """Emit what depends on no head; return the names of the rest, heads excluded."""
    names = [o.name for o in group.graph.operators]
    group.replay([n for n in names if not group.depends(n, heads)])
    return [n for n in names if n not in heads and group.depends(n, heads)]


def emit_collapsed(group: GroupBody) -> None:
    """Σᵢ (x ∗ Wᵢ + bᵢ) + z = x ∗ ΣWᵢ + Σbᵢ + z, with the sums of constants taken in float64 ahead of time."""
    anchors = _shared_anchors(group, group.shape.branches)
    heads = anchors.heads
    names = [o.name for o in group.graph.operators]
    root = next((n for n in names if all(group.depends(n, (h,)) for h in heads)), None)
    if root is None:
        raise LoweringError("no sum takes all branches; leave them apart")
    tensors, constants, tree = _addends(group, root, heads)
    results = [group.graph.by_name[h].outputs[0] for h in heads]
    if len({w.shape for w in anchors.weights}) > 1:
        raise LoweringError("the members' weights differ in shape; they cannot be added")
    rest = _replay_before(group, heads)
    pairs = zip(anchors.weights, results, strict=True)
    total = sum(weight * tensors.count(result) for weight, result in pairs)
    data = group.read(anchors.call.args[0])
    weight = make_constant(total, anchors.dtype)
    value = group.builder.emit(
        relax.Call(anchors.call.op, [data, weight], anchors.attrs), name_hint=heads[0]
    )
    outer = [tensor for tensor in tensors if tensor not in results]
    wide = group.widens and bool(outer)
    if wide:
        value = group.widen(value)
    if constants:
        bias = make_constant(sum(map(as_float, constants)), str(value.ty.dtype))
        value = group.builder.emit(relax.op.add(value, bias))
    for tensor in outer:
        operand = group.value_of(tensor)
        value = group.builder.emit(relax.op.add(value, group.widen(operand) if wide else operand))
    group.bind(root, value)
    after = [n for n in rest if n not in tree]
    (group.replay_wide if wide else group.replay)(after)


def _addends(
    group: GroupBody, root: str, heads: Sequence[str]
) -> tuple[list[str], list[Constant], set[str]]:
    """Take a sum apart.

    Returns
    -------
    tensors : list of str
        What is added, repeats included: results of heads, and values that depend on none.
    constants : list of Constant
        Constants that are added.
    tree : set of str
        The additions.
    """
    graph = group.graph
    leaves: list[str] = []
    constants: list[Constant] = []
    tree: set[str] = set()

    def visit(arg: Any) -> None:
        if isinstance(arg, Constant):
            constants.append(arg)
            return
        tensor = group.tensor_of[arg]
        producer = graph.producer.get(tensor)
        if producer is None or not group.depends(producer.name, heads):
            leaves.append(tensor)
            return
        if producer.name != root and (len(graph.consumers[tensor]) > 1 or tensor in graph.outputs):
            raise LoweringError(
                f"{producer.name} is read outside the sum; its branches cannot collapse"
            )
        if producer.name in heads:
            leaves.append(tensor)
        elif producer.op == "add":
            tree.add(producer.name)
            for operand in group.calls[producer.name].args:
                visit(operand)
        else:
            raise LoweringError(
                f"{producer.op} {producer.name!r} stands between the anchors and their sum, which is then not linear"
            )

    visit(group.var_of[root])
    return leaves, constants, tree


def emit_merged(group: GroupBody) -> None:
    """One anchor for all members: weights concatenated, or stacked where the members are joined element by element."""
    join, branches = group.shape.join, group.shape.branches
    if join is None and group.shape.tail:
        raise LoweringError("only some of the members are joined; leave them apart")
    if join is None and len(group.shape.anchors) > len(branches):
        emit_stacked_rows(group, _shared_anchors(group, branches))
        return
    if join is not None and join.kind != "concat":
        _emit_stacked(group, branches, _shared_anchors(group, branches))
        return
    if join is not None:
        branches = join.branches
        reads = group.graph.by_name[join.operators[-1]].inputs
        if len(join.operators) > 1 or list(reads) != [b.result for b in branches]:
            raise LoweringError("an operand of the concatenation has no weights to merge")
    _emit_concatenated(group, branches, _shared_anchors(group, branches))


def _channel_axis(call: relax.Call) -> int:
    """Axis of the output channels in an anchor's result."""
    if call.op.name == "relax.matmul":
        return call.ty.ndim - 1
    return str(call.attrs.out_layout or call.attrs.data_layout).index("C")


def _emit_concatenated(group: GroupBody, branches: Sequence[Branch], anchors: Anchors) -> None:
    """One anchor with the weights concatenated along output channels; the result split by one block."""
    join, head = group.shape.join, anchors.call
    if not same_structure(group.graph, [_after_head(group, b) for b in branches]):
        raise LoweringError(
            "the members run different operators, or read more than constants; leave them apart"
        )
    if group.graph.by_name[anchors.heads[0]].attrs.get("groups", 1) != 1:
        raise LoweringError("weights of grouped convolutions cannot be concatenated")
    axis = _channel_axis(head)
    rank = len(anchors.weights[0].shape)
    is_conv = head.op.name != "relax.matmul"
    if not is_conv and rank != 2:
        raise LoweringError("batched or one-dimensional weights cannot be concatenated")
    if join is not None and int(group.calls[join.operators[0]].attrs.axis) % head.ty.ndim != axis:
        raise LoweringError(
            "members are concatenated along another axis than their channels; leave them apart"
        )
    weight_axis = str(head.attrs.kernel_layout).index("O") if is_conv else 1
    _replay_before(group, anchors.heads)
    weight = make_constant(np.concatenate(anchors.weights, axis=weight_axis), anchors.dtype)
    merged = group.builder.emit(
        relax.Call(head.op, [group.read(head.args[0]), weight], anchors.attrs),
        name_hint=anchors.heads[0],
    )
    sizes = [int(group.calls[h].ty.shape[axis]) for h in anchors.heads]

    def combined(constants: list[Constant]) -> Constant:
        return _concatenate_operands(constants, sizes, axis, merged.ty.ndim)

    value = _emit_steps(group, merged, [group.steps(b) for b in branches], combined)
    if join is not None:
        group.bind(join.operators[0], value)
        group.replay(group.shape.tail)
        return
    parts = group.builder.emit(emit_split_store(group.builder, value, sizes, axis))
    for k, branch in enumerate(branches):
        name = branch.operators[-1]
        part = relax.TupleGetItem(parts, k)
        group.bind(name, group.builder.emit(part, name_hint=group.var_of[name].name))


def _after_head(group: GroupBody, branch: Branch) -> Branch:
    """A branch without its prologue."""
    return Branch(branch.head, (branch.head, *group.steps(branch)), branch.result)


def _concatenate_operands(
    constants: list[Constant], sizes: Sequence[int], axis: int, ndim: int
) -> Constant:
    """Concatenate per-channel operands; one that broadcasts over channels is repeated for its member's channels."""
    arrays = []
    for constant, size in zip(constants, sizes, strict=True):
        array = as_float(constant)
        array = array.reshape((1,) * (ndim - array.ndim) + array.shape)
        arrays.append(np.repeat(array, size, axis) if array.shape[axis] == 1 else array)
    return make_constant(np.concatenate(arrays, axis), str(constants[0].ty.dtype))


def _can_combine(operator: Operator) -> bool:
    """Whether operands of several members can be one tensor: element by element, aligned at the last axis."""
    return operator.pattern in POINTWISE and operator.op != "prelu"


def _emit_steps(
    group: GroupBody,
    value: Any,
    steps: Sequence[Sequence[str]],
    combined: Callable[[list[Constant]], Constant],
) -> Any:
    """Emit the operators that all members run, once, with combined constant operands."""
    wide = str(value.ty.dtype) == "float32"
    for names in zip(*steps, strict=True):
        operator = group.graph.by_name[names[0]]
        if not _can_combine(operator):
            raise LoweringError(f"members that run {operator.op} cannot be merged")
        calls = [group.calls[name] for name in names]
        args = []
        for k, arg in enumerate(calls[0].args):
            if isinstance(arg, Constant) and arg.ty.ndim > 0:
                constant = combined([call.args[k] for call in calls])
                args.append(group.wide(constant) if wide else constant)
            elif isinstance(arg, relax.Var):
                args.append(value)
            else:
                args.append(group.wide(arg) if wide else arg)
        value = group.emit_wide(calls[0], args)
    return value


def _emit_stacked(group: GroupBody, branches: Sequence[Branch], anchors: Anchors) -> None:
    """One convolution or product with a branch axis; the join reads it at constant branch indices, all in registers.

    The operators that every member runs are applied to all branches at once, in float32 unless
    roundings are kept; what follows (the join, an operand from outside, the tail) is replayed on the branches.
    """
    head = anchors.call
    is_product, rank = head.op.name == "relax.matmul", head.ty.ndim
    plain = len(anchors.weights[0].shape) == 2 if is_product else head.op.name == "relax.nn.conv2d"
    if not plain or len({w.shape for w in anchors.weights}) > 1:
        raise LoweringError(
            "only 2-D convolutions and plain products of equal weight shape can be stacked"
        )
    rest = _replay_before(group, anchors.heads)
    weight = make_constant(np.stack(anchors.weights), anchors.dtype)
    data = group.read(head.args[0])
    if is_product:
        value = group.builder.emit(group.builder.call_te(merged_matmul, data, weight))
        branch_axis = rank - 1
    else:
        found = group.builder.call_te(merged_conv2d, data, weight, anchors.attrs)
        value = group.builder.emit(found)
        branch_axis = 3 if str(head.attrs.data_layout) == "NHWC" else 1
    if group.is_strict:
        value = group.rounded(value, group.var_of[anchors.heads[0]])
    dtype = str(value.ty.dtype)

    def combined(constants: list[Constant]) -> Constant:
        arrays = [as_float(c) for c in constants]
        arrays = [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
        return make_constant(np.stack(arrays, axis=branch_axis), dtype)

    prefix = _common_prefix(group, branches)
    steps = [group.steps(b)[:prefix] for b in branches]
    value = _emit_steps(group, value, steps, combined)
    for k, branch in enumerate(branches):
        last = steps[k][-1] if prefix else branch.head
        part = group.builder.emit(group.builder.call_te(select_branch, value, k, branch_axis))
        group.bind(last, part)
    done = {name for names in steps for name in names}
    (group.replay_wide if group.widens else group.replay)([n for n in rest if n not in done])


def _common_prefix(group: GroupBody, branches: Sequence[Branch]) -> int:
    """Number of operators after the anchor that all branches run alike, on their predecessor and constants alone."""
    shortest = min(len(group.steps(b)) for b in branches)
    for length in range(shortest, 0, -1):
        steps = [group.steps(b)[:length] for b in branches]
        cut = [
            Branch(b.head, (b.head, *names), names[-1])
            for b, names in zip(branches, steps, strict=True)
        ]
        combinable = all(_can_combine(group.graph.by_name[n]) for n in steps[0])
        if combinable and same_structure(group.graph, cut) and _only_read_by_next(group, cut):
            return length
    return 0


def _only_read_by_next(group: GroupBody, branches: Sequence[Branch]) -> bool:
    """Whether each operator but the last is read by the next one alone: only the last keeps a value."""
    for branch in branches:
        for name in branch.operators[:-1]:
            tensor = group.graph.by_name[name].outputs[0]
            if len(group.graph.consumers[tensor]) > 1 or tensor in group.graph.outputs:
                return False
    return True
