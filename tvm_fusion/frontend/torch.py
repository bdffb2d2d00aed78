"""Import of PyTorch programs (torch.export) as canonical Relax modules."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compat import tvm
from ..errors import FusionError, InvalidModelError
from .canonical import canonicalize

if TYPE_CHECKING:
    import torch


def load(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Import a ``torch.export`` program as a canonical Relax module.

    Parameters
    ----------
    program : ExportedProgram or path
        The program, or a ``.pt2`` file written by ``torch.export.save``.
    shape : mapping of input name to sizes, optional
        Sizes of inputs that were exported with dynamic dimensions.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.

    Returns
    -------
    IRModule
        One function ``main``: the user's inputs are its parameters, weights and buffers are
        constants, a single output is returned as it is and several as a tuple. Bindings carry the
        names of the program's fx nodes.

    Raises
    ------
    InvalidModelError
        If the file is missing, truncated or not a torch.export program.
    UnsupportedOperatorError
        If an operator cannot be imported; the message names it and its node.
    ValueError
        If ``shape`` does not fit the program's inputs.
    """
    try:
        from torch.export import ExportedProgram
    except ImportError:
        raise FusionError(
            "importing PyTorch programs needs torch: pip install 'tvm_fusion[torch]'"
        ) from None
    from .torch_importer import import_program
    from .torch_program import with_shapes

    if not isinstance(program, ExportedProgram):
        if not isinstance(program, str | os.PathLike):
            raise InvalidModelError(
                f"expected a torch.export.ExportedProgram or a .pt2 file, got {type(program).__name__}: export the "
                "module with torch.export.export first"
            )
        program = _read(Path(program))
    if shape:
        program = with_shapes(program, shape)
    return canonicalize(import_program(program), dtype)


def _read(path: Path) -> torch.export.ExportedProgram:
    import torch

    if not path.is_file():
        raise InvalidModelError(f"the model file {str(path)!r} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            # Checksums first: torch reads the archive with native code that trusts it.
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise InvalidModelError(
            f"{str(path)!r} is not a .pt2 file, or it is truncated: {error}"
        ) from None
    if damaged is not None:
        raise InvalidModelError(
            f"the part {damaged!r} of {str(path)!r} is damaged: export the model again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except (
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()
        raise InvalidModelError(
            f"{str(path)!r} is not a torch.export program that this torch reads: {reason[0] if reason else error!r}"
        ) from None
