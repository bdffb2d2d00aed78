"""Device functions that multiply-add kernels call, beside those of the tensor-core kernels.

Shared memory is read through them and not by TVM's own loads, so that TVM adds no barriers. They are plain C++: the
compiler places the loads, keeps the arrays in registers, and makes one multiply-add instruction of each product.
"""

from __future__ import annotations

from ....compat import cuda_func_call, tirx
from ..tensor_core.device_code import SOURCES as _COMMON

_HEAD = "__device__ __forceinline__ "
_VECTORS = {1: "float", 2: "float2", 4: "float4"}


def _load(count: int) -> str:
    vector = _VECTORS[count]
    return (
        f"{_HEAD}void tvmf_read_shared_{4 * count}(float* values, int index, const void* shared, int offset) {{\n"
        f"  *({vector}*)(values + index) = *(const {vector}*)((const char*)shared + offset);\n}}\n"
    )


def _store(count: int) -> str:
    vector = _VECTORS[count]
    return (
        f"{_HEAD}void tvmf_write_shared_{4 * count}(void* shared, int offset, const float* values, int index) {{\n"
        f"  *({vector}*)((char*)shared + offset) = *(const {vector}*)(values + index);\n}}\n"
    )


def _outer(rows: int, columns: int) -> str:
    return (
        f"{_HEAD}void tvmf_outer_{rows}x{columns}(float* sums, int at, const float* rows, int row,\n"
        "    const float* columns, int column) {\n"
        "  #pragma unroll\n"
        f"  for (int i = 0; i < {rows}; ++i) {{\n"
        "    #pragma unroll\n"
        f"    for (int j = 0; j < {columns}; ++j)\n"
        f"      sums[at + i * {columns} + j] += rows[row + i] * columns[column + j];\n"
        "  }\n}\n"
    )


def _finish(count: int) -> str:
    """No address of a number is odd, which the compiler does not know."""
    uses = "".join(
        '  asm volatile("{ .reg .pred p;\\n"\n'
        '    "setp.ne.s32 p, %0, 0;\\n"\n'
        '    "@p st.shared.v4.f32 [%1], {%2, %3, %4, %5}; }"\n'
        '    :: "r"(odd), "r"(address), '
        + ", ".join(f'"f"(sums[{first + i}])' for i in range(4))
        + ' : "memory");\n'
        for first in range(0, count, 4)
    )
    return (
        f"{_HEAD}void tvmf_finish_{count}(float* sums, void* shared, const void* any) {{\n"
        "#ifdef __CUDA_ARCH__\n"
        "  unsigned address = (unsigned)__cvta_generic_to_shared(shared), odd;\n"
        '  asm("and.b32 %0, %1, 1;" : "=r"(odd) : "r"((unsigned)(unsigned long long)any));\n'
        f"{uses}#else\n#endif\n}}\n"
    )


def _copies(size: int, count: int, down: int, along: int) -> str:
    """One statement, so that the copies share a predicate; what is not compiled for a device says the same."""
    cache = "cg" if size == 16 else "ca"
    copies = "".join(
        f'    "cp.async.{cache}.shared.global [%0+{number * down}], [%1+{number * along}], {size}, p;\\n"\n'
        for number in range(count)
    )
    return (
        "template <typename T>\n"
        f"{_HEAD}void {_name(size, count, down, along)}(\n"
        "    void* shared, int offset, const T* global, int index, bool valid) {\n"
        "  unsigned address = (unsigned)__cvta_generic_to_shared((const char*)shared + offset);\n"
        "#ifdef __CUDA_ARCH__\n"
        "  // A copy whose source is ignored writes zeros.\n"
        '  asm volatile("{ .reg .pred p;\\n"\n'
        '    "setp.eq.s32 p, %2, 0;\\n"\n'
        f'{copies}    "}}" :: "r"(address), "l"(global + index), "r"((int)valid) : "memory");\n'
        "#else\n"
        f"  for (int i = 0; i < {count}; ++i)\n"
        f'    asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"\n'
        f'      :: "r"(address + i * ({down})), "l"((const char*)(global + index) + i * ({along}L)),\n'
        f'         "r"(valid ? {size} : 0) : "memory");\n'
        "#endif\n}\n"
    )


def _name(size: int, count: int, down: int, along: int) -> str:
    return f"tvmf_copy_async_{size}x{count}_{down}_{along}".replace("-", "m")


def copy_rows(size: int, count: int, down: int, along: int, *arguments) -> tirx.PrimExpr:
    """Copy elements that are equally far apart, all of them or none: (shared, byte offset, global, index, valid).

    Where they are not valid, zeros are written.

    Parameters
    ----------
    size : int
        Bytes of each copy.
    count : int
        How many.
    down, along : int
        Bytes from one to the next in shared and in global memory.
    *arguments : PrimExpr
        See above.
    """
    source = _copies(size, count, down, along)
    return _call(_name(size, count, down, along), source, arguments)


def read_shared(count: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Load 1, 2 or 4 numbers: (values, index, shared, byte offset)."""
    return _call(f"tvmf_read_shared_{4 * count}", _load(count), arguments)


def write_shared(count: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Store 1, 2 or 4 numbers: (shared, byte offset, values, index)."""
    return _call(f"tvmf_write_shared_{4 * count}", _store(count), arguments)


def outer(rows: int, columns: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Add the products of all pairs: (sums, first, rows, first, columns, first)."""
    return _call(f"tvmf_outer_{rows}x{columns}", _outer(rows, columns), arguments)


def finish(count: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Compute all sums before what follows: (sums, shared, address of numbers).

    Where the epilogue uses them under conditions only, the compiler would move products there, and keep what they
    multiply until then: more than fits into registers. It does not where a store that never happens uses them too.
    """
    return _call(f"tvmf_finish_{count}", _finish(count), arguments)


def common(name: str, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Call one of the device functions of the tensor-core kernels."""
    return _call(name, _COMMON[name], arguments)


def _call(name: str, source: str, arguments: tuple) -> tirx.PrimExpr:
    return cuda_func_call(name, *arguments, source_code=source, return_type="void")
