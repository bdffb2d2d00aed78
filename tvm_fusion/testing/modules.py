"""Small canonical modules, built operator by operator, for tests and tutorials."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compat import ir, relax, tvm
from ..frontend.rename import Substitute
from ..graph.relax import from_relax
from ..strategies.base import Proposal, depth_of
from ..strategies.decompose import decompose
from ..transform.annotate import annotate


class ModuleBuilder:
    """Builds a canonical Relax module whose binding names are the given node names.

    Parameters
    ----------
    dtype : str
        Element type of inputs and weights.
    layout : {"NCHW", "NHWC"}
        Layout of convolutions and pooling.
    seed : int
        Seed of the weights.
    """

    def __init__(self, dtype: str = "float32", layout: str = "NCHW", seed: int = 0) -> None:
        self.dtype, self.layout = dtype, layout
        self._rng = np.random.default_rng(seed)
        self._params: list[Any] = []
        self._bindings: list[Any] = []
        self._builder = relax.BlockBuilder()

    def input(self, name: str, shape: Sequence[Any]) -> Any:
        """Add an input of the model."""
        var = relax.Var(name, relax.TensorType(list(shape), self.dtype))
        self._params.append(var)
        return var

    def const(self, *shape: int, scale: float = 1.0) -> Any:
        """A random constant."""
        return self.array(self._rng.standard_normal(shape) * scale)

    def array(self, values: np.ndarray) -> Any:
        """A constant of given values."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            return relax.const(np.asarray(values).astype(ml_dtypes.bfloat16), "bfloat16")
        return relax.const(np.asarray(values).astype(self.dtype))

    def op(self, name: str, call: Any) -> Any:
        """Bind an operator call to a node name."""
        call = self._builder.normalize(call)
        var = relax.DataflowVar(name, call.ty)
        self._bindings.append(relax.VarBinding(var, call))
        return var

    def channels(self, value: Any) -> int:
        """Channels of a 4-D value."""
        return int(value.ty.shape[self.layout.index("C")])

    def conv(
        self,
        name: str,
        value: Any,
        channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
    ) -> Any:
        """A convolution with random weights; "same" padding unless given."""
        inner = self.channels(value) // groups
        shape = (channels, inner, kernel, kernel)
        weight = self._rng.standard_normal(shape) / np.sqrt(inner * kernel * kernel)
        kernel_layout = "OIHW" if self.layout == "NCHW" else "OHWI"
        if self.layout == "NHWC":
            weight = weight.transpose(0, 2, 3, 1)
        call = relax.op.nn.conv2d(
            value, self.array(weight), strides=stride,
            padding=kernel // 2 if padding is None else padding, groups=groups,
            data_layout=self.layout, kernel_layout=kernel_layout,
        )  # fmt: skip
        return self.op(name, call)

    def bias(self, name: str, value: Any) -> Any:
        """Add a random constant per channel of a 4-D value."""
        shape = [1, 1, 1, 1]
        shape[self.layout.index("C")] = self.channels(value)
        return self.op(name, relax.op.add(value, self.const(*shape)))

    def relu(self, name: str, value: Any) -> Any:
        """A ReLU."""
        return self.op(name, relax.op.nn.relu(value))

    def add(self, name: str, left: Any, right: Any) -> Any:
        """A sum of two values."""
        return self.op(name, relax.op.add(left, right))

    def concat(self, name: str, values: Sequence[Any], axis: int | None = None) -> Any:
        """A concatenation, along the channels unless an axis is given."""
        axis = self.layout.index("C") if axis is None else axis
        return self.op(name, relax.op.concat(list(values), axis=axis))

    def split(self, name: str, value: Any, parts: Any, axis: int | None = None) -> list[Any]:
        """The parts of a tensor (a number of equal ones, or where they begin), along the channels by default."""
        axis = self.layout.index("C") if axis is None else axis
        packed = self.op(name, relax.op.split(value, parts, axis=axis))
        fields = range(len(packed.ty.fields))
        return [self.op(f"{name}_{i}", relax.TupleGetItem(packed, i)) for i in fields]

    def dense(self, name: str, value: Any, columns: int, *, bias: bool = True) -> Any:
        """A matrix product with random weights, and a bias named ``name_bias``."""
        inner = int(value.ty.shape[-1])
        product = self.op(
            name, relax.op.matmul(value, self.const(inner, columns, scale=inner**-0.5))
        )
        if not bias:
            return product
        return self.op(f"{name}_bias", relax.op.add(product, self.const(columns)))

    def layer_norm(self, name: str, value: Any) -> Any:
        """A layer norm over the last axis, with random scale and shift."""
        columns = int(value.ty.shape[-1])
        scale, shift = self.const(columns), self.const(columns)
        return self.op(name, relax.op.nn.layer_norm(value, scale, shift, axes=[-1]))

    def finish(self, *results: Any) -> tvm.IRModule:
        """Return the module; the results become its outputs."""
        replaced = {r: relax.Var(r.name, r.ty) for r in results if isinstance(r, relax.DataflowVar)}
        bindings = []
        for binding in self._bindings:
            bindings.append(relax.VarBinding(replaced.get(binding.var, binding.var), binding.value))
        rename = Substitute(dict(replaced))
        bindings = [relax.VarBinding(b.var, rename.visit_expr(b.value)) for b in bindings]
        outs = [replaced.get(r, r) for r in results]
        body = outs[0]
        if len(outs) > 1:
            packed = relax.Tuple(outs)
            body = relax.Var("results", tvm.ir.TupleType([o.ty for o in outs]))
            bindings.append(relax.VarBinding(body, packed))
        attrs = tvm.ir.DictAttrs({"num_input": len(self._params), "global_symbol": "main"})
        seq = relax.SeqExpr([relax.DataflowBlock(bindings)], body)
        func = relax.Function(self._params, seq, body.ty, attrs=attrs)
        return relax.transform.Normalize()(tvm.IRModule({"main": func}))


def as_group(
    mod: tvm.IRModule, strategy: str, operators: Sequence[str] | None = None, **options: str
) -> tvm.IRModule:
    """Annotate some operators of a canonical module as one group, whatever a strategy would propose.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module; it is left untouched.
    strategy : str
        The group's strategy; the group is named ``fused_<strategy>_0``.
    operators : sequence of str, optional
        Node names; all operators when absent.
    **options : str
        The group's options, such as ``form="joined"``.
    """
    found = from_relax(mod)
    names = found.graph.sort(operators or [o.name for o in found.graph.operators])
    shape = decompose(found.graph, names, options)
    proposal = Proposal(
        strategy, names, shape.anchors, tuple(b.operators for b in shape.branches),
        depth_of(found.graph, names), (), tuple(sorted(options.items())),
    )  # fmt: skip
    return annotate(mod, found, {f"fused_{strategy}_0": proposal})


def parallel_convs(
    members: int,
    *,
    channels: int = 64,
    outputs: Sequence[int] | None = None,
    spatial: int = 128,
    kernel: int = 3,
    relu: bool = False,
    join: str | None = "add",
    separate: bool = False,
    dtype: str = "float32",
    layout: str = "NCHW",
) -> tvm.IRModule:
    """Parallel convolutions, summed, concatenated or returned apart.

    Parameters
    ----------
    members : int
        Number of branches.
    channels, spatial, kernel : int
        Input channels, height and width, and kernel size.
    outputs : sequence of int, optional
        Output channels of each branch; ``channels`` when absent.
    relu : bool
        Whether each branch ends in a ReLU.
    join : {"add", "maximum", "concat"} or None
        How the branches are combined; None returns them apart.
    separate : bool
        Whether each branch reads an input of its own.
    dtype, layout : str
        As in `ModuleBuilder`.
    """
    b = ModuleBuilder(dtype, layout)
    shape = (1, channels, spatial, spatial) if layout == "NCHW" else (1, spatial, spatial, channels)
    inputs = [b.input(f"x{i}", shape) for i in range(members if separate else 1)]
    branches = []
    for i in range(members):
        count = outputs[i] if outputs else channels
        value = b.conv(f"conv{i}", inputs[i if separate else 0], count, kernel)
        branches.append(b.relu(f"relu{i}", value) if relu else value)
    if join is None:
        return b.finish(*branches)
    if join == "concat":
        axis = layout.index("C")
        return b.finish(b.op("concat", relax.op.concat(branches, axis=axis)))
    total = branches[0]
    for i, branch in enumerate(branches[1:], start=1):
        total = b.op(f"{join}{i}", getattr(relax.op, join)(total, branch))
    return b.finish(total)


#: Operators of random graphs, the frequent ones more than once.
COMMON_KINDS = tuple(
    "conv conv depthwise bias relu sigmoid add add multiply maximum concat pool mean softmax scale".split()
)
#: These and operators that lead to more kinds of groups.
ALL_KINDS = (*COMMON_KINDS, "split", "minimum", "subtract", "dense", "norm", "gate", "conv", "add")


def random_module(
    seed: int,
    operators: int = 12,
    dtype: str = "float32",
    kinds: Sequence[str] = COMMON_KINDS,
) -> tvm.IRModule:
    """A random graph of mixed operators: convolutions, pointwise operators, joins, pooling and concats.

    Parameters
    ----------
    seed : int
        Decides everything.
    operators : int
        About how many operators to make.
    dtype : str
        Element type.
    kinds : sequence of str
        What to choose from: `COMMON_KINDS`, or `ALL_KINDS` with splits, matrix products, layer
        norms and gates too.
    """
    rnd = random.Random(seed)
    b = ModuleBuilder(dtype, seed=seed)
    extent = rnd.choice([5, 7, 8, 13])
    values = [
        b.input(f"x{i}", (1, rnd.choice([3, 8, 16]), extent, extent))
        for i in range(rnd.randint(1, 2))
    ]
    while len(b._bindings) < operators:
        values.append(_random_operator(rnd, b, values, f"n{len(b._bindings)}", kinds))
    used = {v for binding in b._bindings for v in relax.analysis.free_vars(binding.value)}
    results = [v for v in values if v not in used and isinstance(v, relax.DataflowVar)]
    return b.finish(*results)


def _random_operator(
    rnd: random.Random, b: ModuleBuilder, values: list[Any], name: str, kinds: Sequence[str]
) -> Any:
    """Bind one operator on values made so far, the recent ones more often."""
    value = values[max(rnd.randrange(len(values)), rnd.randrange(len(values)))]
    shape = [int(d) for d in value.ty.shape]
    same = [v for v in values if [int(d) for d in v.ty.shape] == shape]
    kind = rnd.choice(list(kinds))
    if kind == "conv" and min(shape[2:]) > 2:
        return b.conv(
            name, value, rnd.choice([4, 8, 16]), rnd.choice([1, 3]), stride=rnd.choice([1, 1, 1, 2])
        )
    if kind == "depthwise" and min(shape[2:]) > 2:
        return b.conv(name, value, shape[1], 3, groups=shape[1])
    if kind == "bias":
        return b.bias(name, value)
    if kind == "scale":
        return b.op(name, relax.op.multiply(value, b.const(1, shape[1], 1, 1)))
    if kind in ("add", "multiply", "maximum", "minimum", "subtract"):
        return b.op(name, getattr(relax.op, kind)(value, rnd.choice(same)))
    if kind == "concat":
        return b.op(name, relax.op.concat([value, rnd.choice(same)], axis=1))
    if kind == "pool" and min(shape[2:]) > 2:
        pool = rnd.choice([relax.op.nn.max_pool2d, relax.op.nn.avg_pool2d])
        return b.op(name, pool(value, pool_size=3, strides=rnd.choice([1, 2]), padding=1))
    if kind == "mean":
        return b.op(name, relax.op.mean(value, axis=[2, 3], keepdims=True))
    if kind == "softmax":
        return b.op(name, relax.op.nn.softmax(value, axis=1))
    if kind == "sigmoid":
        return b.op(name, relax.op.sigmoid(value))
    if kind == "split" and shape[1] > 1:
        parts = b.split(name, value, [rnd.randrange(1, shape[1])])
        values.append(parts[0])
        return parts[1]
    if kind == "dense":
        return b.dense(name, value, rnd.choice([4, 8]), bias=False)
    if kind == "norm":
        return b.layer_norm(name, value)
    if kind == "gate":
        small = b.op(f"{name}_mean", relax.op.mean(value, axis=[2, 3]))
        small = b.op(f"{name}_gate", relax.op.sigmoid(b.dense(f"{name}_fc", small, shape[1])))
        view = b.op(f"{name}_view", relax.op.reshape(small, (1, shape[1], 1, 1)))
        return b.op(name, relax.op.multiply(value, view))
    return b.relu(name, value)


def kernel_calls(mod: tvm.IRModule) -> list[str]:
    """Names of the PrimFuncs that ``main`` of a lowered module calls, in order; views do not count."""
    out = []
    for binding in mod["main"].body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op == ir.Op.get("relax.call_tir"):
            func = mod[value.args[0]]
            if not relax.analysis.has_reshape_pattern(func):
                out.append(value.args[0].name_hint)
    return out
