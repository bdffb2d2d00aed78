"""Import of Relay modules that TVM 0.8 to 0.16 saved, without a TVM that has Relay.

A model goes through these steps, each in a file of its own::

    JSON ── nodes ──> node table     every index, class and field checked (fields: the table of fields)
         ── flatten ─> RelayGraph    scopes, lets, tuples, calls of functions and sharing resolved
         ── convert ─> Relax         operators/: one converter for each operator
         ── canonical ─> the canonical module, as for ONNX
         ── keep_groups ─> its fusion annotations as group functions
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidModelError
from .arrays import as_params, load_params
from .nodes import NodeTable

if TYPE_CHECKING:
    from ...compat import tvm
    from .graph import RelayGraph

__all__ = ["from_document", "is_relay", "load", "load_params"]


def load(
    model: str | os.PathLike[str],
    *,
    params: Mapping[str, Any] | str | os.PathLike[str] | bytes | None = None,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Import a Relay module as a canonical Relax module.

    Parameters
    ----------
    model : path
        A file with what ``tvm.ir.save_json`` returned for a Relay module or function. Versions 0.8,
        0.9 and 0.16 are tested; others are tried, with a warning.
    params : mapping of name to array, path or bytes, optional
        Values of parameters of ``main``: a dict, or a file (or its content) that
        ``relay.save_param_dict`` wrote.
    shape : mapping of input name to sizes, optional
        Sizes of inputs with symbolic (``?``) dimensions.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.

    Returns
    -------
    IRModule
        ``main`` with the parameters that have no value as its inputs, and one private function for
        each function of the Relay module with ``Composite = "tvm_fusion.<strategy>"``. Bindings
        carry the names that importers of Relay stored, else the operator with a number, as
        ``conv2d_3``.

    Raises
    ------
    InvalidModelError
        If a file is missing or damaged, or an input has a symbolic dimension that ``shape`` does
        not give.
    UnsupportedOperatorError
        If an operator cannot be imported; the message names it and its place.
    ValueError
        If ``shape`` or ``dtype`` does not fit.
    """
    path = Path(model)
    if not path.is_file():
        raise InvalidModelError(f"the model file {str(path)!r} does not exist")
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it does not fit into memory"
        raise InvalidModelError(f"{str(path)!r} is not a readable JSON file: {reason}") from None
    return from_document(document, str(path), params=params, shape=shape, dtype=dtype)


def is_relay(document: Any) -> bool:
    """Return whether a parsed JSON file is a module of TVM before 0.20, or the graph that was built of one."""
    return (
        isinstance(document, dict)
        and "nodes" in document
        and any(key in document for key in ("root", "b64ndarrays", "arg_nodes"))
    )


def from_document(
    document: Any,
    name: str = "the module",
    *,
    params: Mapping[str, Any] | str | os.PathLike[str] | bytes | None = None,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Import a parsed JSON file, called ``name`` in messages; see ``load``."""
    from ..canonical import canonicalize
    from .convert import convert
    from .flatten import flatten
    from .keep_groups import keep_groups

    values = as_params(params)
    try:
        table = NodeTable(document)
        graph = flatten(table, values)
        _warn_of_open_weights(graph, given=bool(values))
        mod = canonicalize(convert(graph, table.version, shape), dtype)
        return keep_groups(mod, graph)
    except InvalidModelError as error:
        raise InvalidModelError(f"{name} cannot be imported: {error}") from None


def _warn_of_open_weights(graph: RelayGraph, given: bool = False) -> None:
    """Warn of inputs that are weights: the parameters file was probably forgotten, or lacks them.

    One alone, where no parameters are given, may be an input on purpose.
    """
    weights = {
        arg.name
        for node in graph.nodes
        if node.op.startswith("nn.conv") or node.op in ("nn.dense", "nn.batch_norm")
        for arg in node.args[1:]
        if hasattr(arg, "name")
    }
    if len(weights) > (0 if given else 1):
        named = ", ".join(sorted(weights)[:3])
        several = (
            f"{len(weights)} weights ({named}, ...) are inputs of the model: give their values"
        )
        alone = f"the weight {named} is an input of the model: give its value"
        warnings.warn(
            f"{several if len(weights) > 1 else alone} with params (--params)",
            stacklevel=4,
        )
