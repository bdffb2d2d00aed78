"""Names that change between releases of TVM or Python, in one place (written for apache-tvm 0.27).

TVM renames much at each release (``tir`` became ``tirx`` and ``s_tir``, ``struct_info`` became
``ty``). Modules of this package take such names from here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, sym, te, tirx, topi
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir.expr import GenericConst as Constant
from tvm.relax import BlockBuilder
from tvm.relax.expr import _update_type as update_type
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as script_builder
from tvm.target import Target, codegen

from . import errors

__all__ = [
    "BlockBuilder",
    "Constant",
    "IRBuilder",
    "PyExprMutator",
    "Target",
    "codegen",
    "cuda_func_call",
    "import_tensor_intrinsics",
    "ir",
    "mutator",
    "process_cpu_count",
    "relax",
    "s_tir",
    "script_builder",
    "silent_native",
    "structural_equal",
    "structural_hash",
    "sym",
    "te",
    "tirx",
    "topi",
    "tvm",
    "update_type",
    "with_functions",
]

# An exception that a pass raises crosses TVM's C++ code, which keeps the type of registered ones
# only.
for _error in vars(errors).values():
    if isinstance(_error, type) and issubclass(_error, errors.FusionError):
        tvm_ffi.register_error(f"tvm_fusion.{_error.__name__}", _error)

structural_equal = tvm_ffi.structural_equal
structural_hash = tvm_ffi.structural_hash


def process_cpu_count() -> int:
    """Count the cores that this process may use (``os.process_cpu_count`` of Python 3.13).

    A container or ``taskset`` gives fewer than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def import_tensor_intrinsics() -> None:
    """Import TVM's tensor intrinsics, which its default pipeline for GPUs does, in two seconds instead of 25.

    TVM's parser asks ``inspect.stack`` for variables of its callers, for each of hundreds of intrinsics, and that reads
    the source text of every frame, of which TVM uses nothing.
    """
    real = inspect.stack

    def without_source(context: int = 1) -> list[inspect.FrameInfo]:
        del context
        frame: types.FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            code = frame.f_code
            found.append(
                inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
            )
            frame = frame.f_back
        return found

    inspect.stack = without_source
    try:
        importlib.import_module("tvm.s_tir.tensor_intrin")
    finally:
        inspect.stack = real


@contextlib.contextmanager
def silent_native() -> Iterator[None]:
    """Hide what TVM's C++ code writes to stderr by itself.

    TVM logs a warning for every constant of a library that it loads; a user can do nothing about
    them.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def with_functions(mod: tvm.IRModule, functions: Mapping[Any, Any] | None = None) -> tvm.IRModule:
    """Return a new module with a module's attributes and other functions (its own when absent)."""
    kept = dict(mod.functions.items()) if functions is None else dict(functions)
    return tvm.IRModule(kept, attrs=dict(mod.attrs.items()) if mod.attrs else {})
