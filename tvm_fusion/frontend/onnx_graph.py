"""Preparation of an ONNX graph before TVM sees it: weights apart, dimensions, operators, names, sums."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidModelError, UnsupportedOperatorError

if TYPE_CHECKING:
    import onnx

#: Initializers above this size stay out of everything that copies or evaluates the graph.
LARGE_BYTES = 64 << 10

#: Domains whose operators TVM's converters know by name.
KNOWN_DOMAINS = ("", "ai.onnx", "com.microsoft")

#: Operators with bodies; TVM 0.27 imports none of them into a dataflow block.
CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


def split_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Return a copy of ``model`` without its large initializers, and those by name.

    In the copy a large initializer is a graph input, so that the copy is a legal model that checks
    and infers the same shapes. The given model is not changed, and its large tensors are not
    copied.

    Raises
    ------
    InvalidModelError
        If an initializer has no name, a negative dimension, or its data elsewhere.
    """
    import onnx

    skeleton, large = onnx.ModelProto(), {}
    for field, value in model.ListFields():
        if field.name == "graph":
            continue
        target = getattr(skeleton, field.name)
        if hasattr(target, "extend"):
            target.extend(value)
        else:
            setattr(skeleton, field.name, value)
    graph = skeleton.graph
    graph.name = model.graph.name or "graph"
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    inputs = {value.name for value in model.graph.input}
    for node in model.graph.node:
        tensor = _constant_tensor(node)
        if tensor is not None and _is_large(tensor) and node.output:
            large[node.output[0]] = tensor
        else:
            graph.node.append(node)
    for tensor in model.graph.initializer:
        _check_tensor(tensor)
        if _is_large(tensor):
            large[tensor.name] = tensor
        else:
            graph.initializer.append(tensor)
    for name, tensor in large.items():
        if name not in inputs:
            graph.input.append(
                onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            )
    return skeleton, large


def require_text(graph: onnx.GraphProto) -> None:
    """Raise InvalidModelError when a name is not text: protobuf gives undecodable names as bytes.

    Names of operators have no control characters either; errors print them as they are.
    """
    kinds = [name for node in graph.node for name in (node.op_type, node.domain)]
    names = [
        name
        for node in graph.node
        for name in (node.op_type, node.domain, node.name, *node.input, *node.output)
    ]
    names += [attribute.name for node in graph.node for attribute in node.attribute]
    names += [named.name for named in (*graph.initializer, *graph.input, *graph.output)]
    if not all(isinstance(name, str) for name in names) or not all(map(str.isprintable, kinds)):
        raise InvalidModelError("the model has names that are not text: the file is damaged")


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next(
        (attr.t for attr in node.attribute if attr.name == "value" and attr.HasField("t")), None
    )


def _check_tensor(tensor: onnx.TensorProto) -> None:
    import onnx

    if not tensor.name:
        raise InvalidModelError("an initializer of the model has no name")
    if any(dim < 0 for dim in tensor.dims):
        raise InvalidModelError(
            f"initializer {tensor.name!r} has a negative dimension: {list(tensor.dims)}"
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise InvalidModelError(
            f"the data of initializer {tensor.name!r} is in an external file: load the model by its path"
        )


def _is_large(tensor: onnx.TensorProto) -> bool:
    """Return whether the shape asks for more than ``LARGE_BYTES`` (eight bytes an element; ByteSize() would copy)."""
    return 8 * math.prod(tensor.dims) > LARGE_BYTES


def model_inputs(
    graph: onnx.GraphProto, weights: Mapping[str, object]
) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not initializers."""
    constant = {tensor.name for tensor in graph.initializer} | set(weights)
    return [value for value in graph.input if value.name not in constant]


def fix_dimensions(
    graph: onnx.GraphProto, weights: Mapping[str, object], shape: Mapping[str, Sequence[int]] | None
) -> None:
    """Set the inputs' symbolic dimensions in place; what ``shape`` leaves open gets a legal symbolic name.

    Raises
    ------
    ValueError
        If ``shape`` names an unknown input, has another rank or contradicts a static dimension, or
        an input has an unknown rank and no shape given.
    """
    inputs = model_inputs(graph, weights)
    _forget_placeholders(inputs)
    listing = "; the model's inputs are " + ", ".join(f"{v.name}={describe(v)}" for v in inputs)
    shape = dict(shape or {})
    for name in shape:
        if name not in {value.name for value in inputs}:
            raise ValueError(f"the model has no input {name!r}{listing}")
    symbols: dict[str, int] = {}
    for value in inputs:
        _require_tensor(graph, value)
        if value.name in shape:
            _fix_input(value, shape[value.name], symbols, listing)
        elif not value.type.tensor_type.HasField("shape"):
            raise ValueError(
                f"input {value.name!r} has an unknown shape: give it one with shape={listing}"
            )
    names: dict[str, str] = {}
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param and dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]
            elif dim.dim_value <= 0:  # absent, or the 0 and -1 that old exporters write for "any"
                dim.dim_param = _symbol(dim.dim_param or f"{value.name}_{axis}", names)
    # Shapes that the file states for other values may contradict what was fixed; inference states
    # them again.
    del graph.value_info[:]
    for value in graph.output:
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param or dim.dim_value <= 0:
                dim.Clear()


def _forget_placeholders(inputs: Sequence[onnx.ValueInfoProto]) -> None:
    """Take away names of dimensions that are none ("?"): they stand for any size, not for the same one each time."""
    for value in inputs:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and not any(c.isalnum() for c in dim.dim_param):
                dim.Clear()


def _fix_input(
    value: onnx.ValueInfoProto, given: Sequence[int], symbols: dict[str, int], listing: str
) -> None:
    sizes = list(given)
    if not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31
        for size in sizes
    ):
        raise ValueError(
            f"the shape of input {value.name!r} must be positive integers below 2**31, got {given!r}{listing}"
        )
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        for size in sizes:
            tensor.shape.dim.add().dim_value = size
        return
    if len(sizes) != len(tensor.shape.dim):
        raise ValueError(
            f"input {value.name!r} has {len(tensor.shape.dim)} dimensions, but the given shape "
            f"{tuple(sizes)} has {len(sizes)}{listing}"
        )
    stated = describe(value)
    for dim, size in zip(tensor.shape.dim, sizes, strict=True):
        if dim.dim_value > 0 and dim.dim_value != size:
            raise ValueError(
                f"input {value.name!r} has the static shape {stated}, which {tuple(sizes)} contradicts: "
                f"export the model with symbolic dimensions to change them{listing}"
            )
        if dim.dim_param and symbols.setdefault(dim.dim_param, size) != size:
            raise ValueError(
                f"dimension {dim.dim_param!r} is given both {symbols[dim.dim_param]} and {size}{listing}"
            )
        dim.dim_value = size


def describe(value: onnx.ValueInfoProto) -> str:
    """Return an input's shape as text: "1,3,224,224", with names or ? for symbolic dimensions."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return "unknown"
    dims = value.type.tensor_type.shape.dim
    return (
        ",".join(str(d.dim_value) if d.dim_value > 0 else d.dim_param or "?" for d in dims)
        or "scalar"
    )


def _require_tensor(graph: onnx.GraphProto, value: onnx.ValueInfoProto) -> None:
    if not value.name:
        raise InvalidModelError("an input of the model has no name")
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.elem_type:
        users = [node.op_type for node in graph.node if value.name in node.input]
        place = f" (of operator {users[0]})" if users else ""
        raise InvalidModelError(
            f"input {value.name!r}{place} is not a tensor: only tensor inputs are supported"
        )


def _symbol(name: str, names: dict[str, str]) -> str:
    """Return an identifier for a symbolic dimension: TVM would read "a-b" as an expression."""
    if name not in names:
        symbol = re.sub(r"\W", "_", name, flags=re.ASCII)
        symbol = symbol if symbol[:1].isalpha() else f"d_{symbol}"
        while symbol in names.values():
            symbol += "_"
        names[name] = symbol
    return names[name]


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every unnamed node the name of its first output, in place."""
    for node in graph.node:
        if not node.name:
            node.name = next((output for output in node.output if output), node.op_type)


def refuse_unknown_operators(
    graph: onnx.GraphProto,
    opset: int,
    *,
    known: Collection[str] | None = None,
    local: Collection[str] = (),
) -> None:
    """Raise UnsupportedOperatorError naming every operator that cannot be imported.

    Parameters
    ----------
    graph : GraphProto
        The graph, nodes named.
    opset : int
        The model's opset in the default domain.
    known : collection of str, optional
        Operators that TVM converts; without it only operators that ONNX itself does not define are
        refused (before simplification, which may remove others).
    local : collection of str
        Names of the model's own functions, which are inlined later.
    """
    import onnx

    missing = []
    for node in graph.node:
        domain = node.domain or ""
        label = f"{domain}::{node.op_type}" if domain not in ("", "ai.onnx") else node.op_type
        if node.op_type in local:
            continue
        if known is None:
            legal = domain == "com.microsoft" or (
                domain in KNOWN_DOMAINS and onnx.defs.has(node.op_type)
            )
        else:
            legal = (
                domain in KNOWN_DOMAINS
                and node.op_type in known
                and node.op_type not in CONTROL_FLOW
            )
        if not legal:
            missing.append(f"{label} (node {node.name!r})")
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        if any(node.op_type in CONTROL_FLOW for node in graph.node):
            more += "; store in the model the input that a condition or a count depends on"
        raise UnsupportedOperatorError(
            f"the model (opset {opset}) uses operators that cannot be imported: {', '.join(missing[:5])}{more}"
        )
