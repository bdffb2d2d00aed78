"""CUDA source of scheduled functions, generated without running a CUDA compiler."""

from __future__ import annotations

import threading
from typing import Any

import tvm_ffi

from ..compat import Target, tvm
from . import tir_pipeline

#: Through this function TVM's code generator asks for machine code.
COMPILE_HOOK = "tvm_callback_cuda_compile"

#: The hook is global to the process.
HOOK_LOCK = threading.Lock()


def cuda_source(mod: tvm.IRModule, target: Target) -> str:
    """Generate CUDA source.

    Parameters
    ----------
    mod : tvm.IRModule
        Scheduled PrimFuncs, each with its symbol.
    target : Target
        A CUDA target.

    Returns
    -------
    str
        Source of all kernels; the kernel of a function ``f`` is named ``f_kernel``.
    """
    with HOOK_LOCK:
        real = tvm.get_global_func(COMPILE_HOOK)
        tvm_ffi.register_global_func(COMPILE_HOOK, lambda code: b"not compiled", override=True)
        try:
            config = {"tirx.use_async_copy": True}
            with tvm.transform.PassContext(opt_level=3, config=config):
                built = tvm.compile(mod, target=target, tir_pipeline=tir_pipeline.NAME)
        finally:
            tvm_ffi.register_global_func(COMPILE_HOOK, real, override=True)
    return "\n".join(device_sources(built.mod))


def device_sources(module: Any) -> list[str]:
    """CUDA source of a runtime module and what it imports."""
    own = [module.inspect_source()] if module.kind == "cuda" else []
    return own + [s for imported in module.imports for s in device_sources(imported)]
