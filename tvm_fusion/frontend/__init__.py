"""Import: a model file, a torch program or a Relax module becomes one canonical Relax module."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidModelError

if TYPE_CHECKING:
    from ..compat import tvm

__all__ = ["from_relax", "load", "onnx", "relay", "torch"]

#: Suffix -> module with a function ``load``.
_LOADERS = {".onnx": "onnx", ".pt2": "torch", ".json": "saved_json"}


def __getattr__(name: str) -> Any:
    # On demand: the child processes that check files import this package, and need no TVM.
    if name == "from_relax":
        return importlib.import_module(".relax", __name__).from_relax
    if name in ("onnx", "relay", "torch"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(
    path: str | os.PathLike[str],
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    params: str | os.PathLike[str] | None = None,
) -> tvm.IRModule:
    """Import a model file as a canonical Relax module.

    Parameters
    ----------
    path : path
        ``.onnx``, ``.pt2`` (saved by ``torch.export.save``) or ``.json`` (a module saved by
        ``tvm.ir.save_json``: Relax, or Relay of TVM 0.8 to 0.16).
    shape : mapping of input name to sizes, optional
        Sizes of inputs with symbolic dimensions.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.
    params : path, optional
        For a ``.json`` file: values of parameters, in a file that ``save_param_dict`` of Relay or
        of ``tvm.runtime`` wrote.

    Returns
    -------
    IRModule
        One function ``main`` of Relax operators whose parameters are the model's inputs; for a
        Relay module that is annotated, also one function for each fusion group.

    Raises
    ------
    InvalidModelError
        If the file is missing, damaged or of an unknown kind.
    UnsupportedOperatorError
        If an operator cannot be imported; the message names it.
    ValueError
        If ``shape`` or ``dtype`` does not fit, or ``params`` is given for another kind of file.
    """
    if shape is not None and not isinstance(shape, Mapping):
        raise ValueError(
            f"shape must map names of inputs to sizes, as {{'x': (1, 3)}}, got {shape!r}"
        )
    path = Path(path)
    if path.is_dir():
        raise InvalidModelError(f"{str(path)!r} is a folder; name a model file")
    if not path.is_file():
        raise InvalidModelError(f"the model file {str(path)!r} does not exist")
    loader = _LOADERS.get(path.suffix.lower())
    if loader is None:
        raise InvalidModelError(
            f"cannot tell the kind of the model file {str(path)!r}: its name must end in {', '.join(_LOADERS)}"
        )
    if params is not None and loader != "saved_json":
        raise ValueError(
            f"params (--params) goes with a .json module; {path.name} holds its weights"
        )
    more = {} if params is None else {"params": params}
    return importlib.import_module(f".{loader}", __name__).load(
        path, shape=shape, dtype=dtype, **more
    )
