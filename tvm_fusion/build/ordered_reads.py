"""Reads of what earlier kernels wrote stay behind the wait for them.

A kernel that is launched before its predecessor is complete waits (``griddepcontrol.wait``) before it reads anything
but constants. nvcc does not keep that order: a pointer that is ``__restrict__`` and never written through is read-only
memory for it, which no wait concerns, so that it may read before the wait (ptxas 13.0 did in the kernel of a residual
and a layer normalisation), and may read through a cache that is not coherent (``ld.global.nc``, which PTX ISA 9.0
allows of memory that nobody writes while the kernel runs). So the pointers to everything but constants are made
opaque behind the wait: an address that comes out of a volatile ``asm`` cannot be known earlier, and is derived from no
``__restrict__`` pointer. Outputs stay as they are, so that reads may still pass writes; what is written depends on what
is read, unless nothing but constants is read, and then outputs are made opaque as well.
"""

from __future__ import annotations

import tvm_ffi

from ..compat import cuda_func_call, ir, tirx
from ..schedules.analysis import buffer_key, nodes_of
from ..schedules.base import CONSTANTS

#: Device function that waits for the previous kernel.
WAIT = "tvmf_wait_for_previous"

_FORGET = (
    "template <typename T>\n"
    "__device__ __forceinline__ void tvmf_forget(T* __restrict__& pointer) {\n"
    "#ifdef __CUDA_ARCH__\n"
    # As an address of global memory, or nvcc takes it for one of any memory.
    "  unsigned long long address = __cvta_generic_to_global(pointer);\n"
    '  asm volatile("" : "+l"(address) :: "memory");\n'
    "  pointer = (T*)__cvta_global_to_generic(address);\n"
    "#endif\n}\n"
)
#: How the names of device functions begin that write through their first argument.
_STORE = "tvmf_store_global"


def device_function(call: ir.Call) -> str:
    """Name of the device function that a call calls; empty if it calls none."""
    if getattr(call.op, "name", "") != "tirx.cuda.func_call":
        return ""
    return str(getattr(call.args[0], "value", ""))


def ordered_reads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make pointers opaque behind each wait for the previous kernel.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function for CUDA. Parameters that its attribute ``tvm_fusion.constants`` numbers
        are constants.

    Returns
    -------
    PrimFunc
        The same function, if it does not wait.
    """
    if not any(device_function(call) == WAIT for call in nodes_of(func.body, ir.Call)):
        return func
    constants = set(map(int, func.attrs.get(CONSTANTS, ()))) if func.attrs is not None else set()
    names = _names(func)
    used = _used(func)
    inputs = {key for key in names if key in used and names[key][0] not in constants}
    # Without inputs there are outputs alone.
    forgotten = [
        tirx.Evaluate(cuda_func_call("tvmf_forget", buffer.data, source_code=_FORGET))
        for key, (number, buffer) in names.items()
        if (key in inputs if inputs else number not in constants)
    ]

    def behind(statement: tirx.Evaluate) -> tirx.Stmt:
        call = statement.value
        if not isinstance(call, ir.Call) or device_function(call) != WAIT:
            return statement
        return tirx.SeqStmt([statement, *forgotten])

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.Evaluate, behind)]))


def _names(func: tirx.PrimFunc) -> dict[str, tuple[int, tirx.Buffer]]:
    """Parameters and their views by key, with the number of the parameter."""
    names = {buffer_key(param): (number, param) for number, param in enumerate(func.params)}
    for view in nodes_of(func.body, tirx.DeclBuffer):
        if of := names.get(_buffer_of(view.data)):
            names[buffer_key(view.buffer)] = (of[0], view.buffer)
    return names


def _used(func: tirx.PrimFunc) -> set[str]:
    """Keys of the buffers that a function reads, or hands to a device function that may."""
    used = {buffer_key(load.source) for load in nodes_of(func.body, ir.TensorLoad)}
    for call in nodes_of(func.body, ir.Call):
        if name := device_function(call):
            # The name comes first.
            handed = call.args[2:] if name.startswith(_STORE) else call.args[1:]
            used |= {_buffer_of(argument) for argument in handed}
    return used


def _buffer_of(pointer: ir.Expr) -> str:
    """Key of the buffer that a pointer points to; empty if it is no buffer's."""
    if not isinstance(pointer, ir.Call) or getattr(pointer.op, "name", "") != "tirx.buffer_data":
        return ""
    return buffer_key(pointer.args[0])
