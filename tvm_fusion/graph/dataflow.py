"""Operators and tensors of a model, without any compiler's types.

Everything between the two ends of the package (strategies, guards, planner) reads this graph and
nothing else, so that it serves every dialect and can be tested without TVM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ..errors import InvalidModelError
from ._native import Dataflow, Reachability

#: Patterns that can be computed where their operand is: in registers, element by element.
POINTWISE = ("elementwise", "broadcast")

#: Operators that read the places of their first operand that the second one names.
LOOKUPS = ("take", "gather_elements", "gather_nd")

#: Attribute of a slice of known place: axes, begins, ends and, if there are any, steps.
SLICE = "slice"

#: Attribute of an addition or selection by a constant causal mask: how much further than its own position a row sees.
CAUSAL = "causal"

#: Bytes of one element.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One value that an operator reads or writes.

    Attributes
    ----------
    name : str
        Unique in its graph.
    shape : tuple of (int or None)
        Extents; ``None`` where an extent is symbolic.
    dtype : str
        Element type, such as ``"float16"``.
    layout : str or None
        ``"NCHW"``, ``"NHWC"`` and the like where the producer declares one.
    is_constant : bool
        True for weights and other values known at compile time.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    layout: str | None = None
    is_constant: bool = False

    @functools.cached_property
    def is_static(self) -> bool:
        """Whether every extent is known."""
        return all(extent is not None for extent in self.shape)

    @functools.cached_property
    def size(self) -> int:
        """Number of elements; a symbolic extent counts as one."""
        out = 1
        for extent in self.shape:
            out *= 1 if extent is None else extent
        return out

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes; a symbolic extent counts as one."""
        return self.size * DTYPE_BYTES.get(self.dtype, 4)

    def __str__(self) -> str:
        extents = ",".join("?" if extent is None else str(extent) for extent in self.shape)
        return f"{self.dtype}[{extents}]"


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator call.

    Attributes
    ----------
    name : str
        Unique in its graph; the source node's name, with ``#2``, ``#3``… where a node became
        several operators.
    op : str
        Operator type without dialect prefix, such as ``"conv2d"`` or ``"add"``.
    source_names : tuple of str
        Names of the nodes of the user's model that this operator came from.
    inputs, outputs : tuple of str
        Tensor names.
    attrs : mapping
        Attributes as plain Python values.
    pattern : str
        One of ``operators.PATTERNS``: what a fusion may do with it.
    flops : int
        Arithmetic operations on floating-point values (a multiply-add counts two).
    bytes_read, bytes_written : int
        Traffic of the operator as a kernel of its own: each distinct tensor once. Zero for views.
    """

    name: str
    op: str
    source_names: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    pattern: str
    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def does_work(self) -> bool:
        """Whether the operator needs a kernel (views and constant-only operators do not)."""
        return self.pattern != "view"

    @property
    def structure(self) -> str:
        """The attributes that tell operators of a kind apart, as text: not which part a slice takes."""
        return str(sorted(item for item in self.attrs.items() if item[0] != SLICE))

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved, unfused."""
        traffic = self.bytes_read + self.bytes_written
        return self.flops / traffic if traffic else 0.0


@dataclasses.dataclass(frozen=True)
class DataflowGraph:
    """Operators in topological order and their tensors.

    Attributes
    ----------
    operators : tuple of Operator
        In topological order.
    tensors : mapping of str to Tensor
        Every tensor by name.
    inputs, outputs : tuple of str
        Names of the model's input and output tensors.

    Raises
    ------
    InvalidModelError
        If an operator reads a tensor that no earlier operator, input or constant provides.
    """

    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs) | {t.name for t in self.tensors.values() if t.is_constant}
        for operator in self.operators:
            missing = [name for name in operator.inputs if name not in known]
            if missing:
                raise InvalidModelError(
                    f"operator {operator.name!r} reads {missing[0]!r}, which nothing before it provides; "
                    "give the operators in topological order"
                )
            known.update(operator.outputs)

    def __len__(self) -> int:
        return len(self.operators)

    def __str__(self) -> str:
        lines = []
        for operator in self.operators:
            shapes = ", ".join(str(self.tensors[name]) for name in operator.outputs)
            lines.append(
                f"{operator.name}: {operator.op}({', '.join(operator.inputs)}) -> {shapes}"
            )
        return "\n".join(lines)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Operator]:
        """Operators by name."""
        return {operator.name: operator for operator in self.operators}

    @functools.cached_property
    def index(self) -> Mapping[str, int]:
        """Topological position of each operator."""
        return {operator.name: i for i, operator in enumerate(self.operators)}

    @functools.cached_property
    def producer(self) -> Mapping[str, Operator]:
        """The operator that writes each tensor (inputs and constants have none)."""
        return {name: operator for operator in self.operators for name in operator.outputs}

    @functools.cached_property
    def consumers(self) -> Mapping[str, tuple[Operator, ...]]:
        """The operators that read each tensor, in topological order."""
        out: dict[str, list[Operator]] = {name: [] for name in self.tensors}
        for operator in self.operators:
            for name in dict.fromkeys(operator.inputs):
                out[name].append(operator)
        return {name: tuple(found) for name, found in out.items()}

    @functools.cached_property
    def level(self) -> Mapping[str, int]:
        """Length of the longest path of working operators that ends at each operator."""
        out: dict[str, int] = {}
        for operator in self.operators:
            before = [out[p.name] for p in self.predecessors(operator)]
            out[operator.name] = max(before, default=0) + int(operator.does_work)
        return out

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """Results that later stages keep with the graph, by a key of their own."""
        return {}

    @functools.cached_property
    def reachability(self) -> Reachability:
        """Transitive closure over operator positions (native)."""
        edges = [
            (self.index[p.name], self.index[operator.name])
            for operator in self.operators
            for p in self.predecessors(operator)
        ]
        return Reachability(len(self.operators), edges)

    @functools.cached_property
    def core(self) -> Dataflow:
        """Operators and tensors as numbers (native): operators by position, tensors by ``tensor_index``."""
        shapes: dict[tuple[int | None, ...], int] = {}
        results = set(self.outputs)
        moved = self.read_bytes
        tensors = [
            (
                moved.get(name, t.nbytes),
                t.size,
                shapes.setdefault(t.shape, len(shapes)),
                name in results,
                t.is_constant,
            )
            for name, t in self.tensors.items()
        ]
        number = self.tensor_index
        operators = [
            (
                o.pattern in POINTWISE,
                o.does_work,
                [number[t] for t in o.inputs],
                [number[t] for t in o.outputs],
            )
            for o in self.operators
        ]
        return Dataflow(self.reachability, tensors, operators)

    @functools.cached_property
    def read_bytes(self) -> Mapping[str, int]:
        """Bytes that a kernel reads of each table that is only looked up: as many as the largest result has."""
        out = {}
        for name, readers in self.consumers.items():
            if (
                readers
                and name not in self.producer
                and all(o.op in LOOKUPS and o.inputs[0] == name for o in readers)
            ):
                largest = max(self.tensors[t].nbytes for o in readers for t in o.outputs)
                out[name] = min(self.tensors[name].nbytes, largest)
        return out

    @functools.cached_property
    def tensor_index(self) -> Mapping[str, int]:
        """Position of each tensor in ``tensors``."""
        return {name: i for i, name in enumerate(self.tensors)}

    @functools.cached_property
    def _tensor_names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Operator names in topological order."""
        return tuple(operator.name for operator in self.operators)

    @functools.cached_property
    def _neighbours(self) -> Mapping[str, tuple[tuple[Operator, ...], tuple[Operator, ...]]]:
        """Predecessors and successors of each operator."""
        out = {}
        for operator in self.operators:
            before = (self.producer.get(name) for name in operator.inputs)
            after = (c for name in operator.outputs for c in self.consumers[name])
            out[operator.name] = (
                tuple({p.name: p for p in before if p is not None}.values()),
                tuple({c.name: c for c in after}.values()),
            )
        return out

    def predecessors(self, operator: Operator) -> tuple[Operator, ...]:
        """Distinct operators whose results ``operator`` reads."""
        return self._neighbours[operator.name][0]

    def successors(self, operator: Operator) -> tuple[Operator, ...]:
        """Distinct operators that read a result of ``operator``."""
        return self._neighbours[operator.name][1]

    def depends(self, later: str, earlier: str) -> bool:
        """Whether operator ``later`` needs a result of ``earlier``, directly or not."""
        return self.reachability.reaches(self.index[earlier], self.index[later])

    def is_convex(self, names: Iterable[str]) -> bool:
        """Whether no path leaves the set of operators and comes back to it."""
        return self.reachability.is_convex([self.index[name] for name in names])

    def is_jointly_acyclic(self, groups: Iterable[Iterable[str]]) -> bool:
        """Whether contracting every group to one node leaves no cycle."""
        return self.reachability.is_acyclic_contracted(
            [[self.index[name] for name in group] for group in groups]
        )

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """Operator names in topological order, without repeats."""
        return tuple(sorted(set(names), key=self.index.__getitem__))

    def places(self, names: Iterable[str]) -> tuple[int, ...]:
        """Where operators stand: what decides between equals, so that no name does."""
        return tuple(map(self.index.__getitem__, names))

    def external_inputs(self, names: Iterable[str]) -> tuple[str, ...]:
        """Tensors that a set of operators reads and does not produce, in first-use order."""
        if isinstance(names, tuple) and len(names) == 1:  # every operator is asked about alone
            return tuple(dict.fromkeys(self.by_name[names[0]].inputs))
        found = self.core.external_inputs([self.index[name] for name in names])
        return tuple(self._tensor_names[i] for i in found)

    def external_outputs(self, names: Iterable[str]) -> tuple[str, ...]:
        """Tensors that a set of operators produces and that are read outside it (or returned)."""
        if isinstance(names, tuple) and len(names) == 1:
            made = self.by_name[names[0]].outputs
            return tuple(t for t in made if self.consumers[t] or t in self.outputs)
        found = self.core.external_outputs([self.index[name] for name in names])
        return tuple(self._tensor_names[i] for i in found)

    def traffic(self, names: Iterable[str]) -> tuple[int, int]:
        """Bytes read and written by one kernel that computes a set of operators."""
        if isinstance(names, tuple) and len(names) == 1:
            read, written = self.external_inputs(names), self.external_outputs(names)
            moved = (self.read_bytes.get(t, self.tensors[t].nbytes) for t in read)
            return sum(moved), sum(self.tensors[t].nbytes for t in written)
        return self.core.traffic([[self.index[name] for name in names]])[0]

    def depth(self, names: Iterable[str]) -> int:
        """Working operators on the longest path inside a set of operators."""
        return self.core.depth([[self.index[name] for name in names]])[0]


def unique_name(name: str, taken: Container[str]) -> str:
    """The name, or with ``#2``, ``#3``… behind it the first that is not taken."""
    if name not in taken:
        return name
    k = 2
    while f"{name}#{k}" in taken:
        k += 1
    return f"{name}#{k}"
