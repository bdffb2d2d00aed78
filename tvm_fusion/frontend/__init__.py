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

__all__ = ["from_relax", "load", "onnx", "torch"]

#: Suffix -> (module, function).
_LOADERS = {".onnx": ("onnx", "load"), ".pt2": ("torch", "load"), ".json": ("relax", "load_json")}


def __getattr__(name: str) -> Any:
    # On demand: the child processes that check files import this package, and need no TVM.
    if name == "from_relax":
        return importlib.import_module(".relax", __name__).from_relax
    if name in ("onnx", "torch"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(
    path: str | os.PathLike[str],
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Import a model file as a canonical Relax module.

    Parameters
    ----------
    path : path
        ``.onnx``, ``.pt2`` (saved by ``torch.export.save``) or ``.json`` (a Relax module saved by
        ``tvm.ir.save_json``).
    shape : mapping of input name to sizes, optional
        Sizes of inputs with symbolic dimensions.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.

    Returns
    -------
    IRModule
        One function ``main`` of Relax operators whose parameters are the model's inputs.

    Raises
    ------
    InvalidModelError
        If the file is missing, damaged or of an unknown kind.
    UnsupportedOperatorError
        If an operator cannot be imported; the message names it.
    ValueError
        If ``shape`` or ``dtype`` does not fit.
    """
    path = Path(path)
    loader = _LOADERS.get(path.suffix.lower())
    if loader is None:
        raise InvalidModelError(
            f"cannot tell the kind of the model file {str(path)!r}: its name must end in {', '.join(_LOADERS)}"
        )
    if path.is_dir():
        raise InvalidModelError(f"{str(path)!r} is a folder; name a model file")
    if not path.is_file():
        raise InvalidModelError(f"the model file {str(path)!r} does not exist")
    module, function = loader
    return getattr(importlib.import_module(f".{module}", __name__), function)(
        path, shape=shape, dtype=dtype
    )
