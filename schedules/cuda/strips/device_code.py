"""Device functions that strip kernels call, beside those of the tensor-core kernels.

Loads are PTX: with a predicate instead of a branch, so that all loads of a row are on their way together, and not moved
in front of the wait for the previous kernel. What is not compiled for a device says the same in plain C++.
"""

from __future__ import annotations

from ....compat import cuda_func_call, tirx
from ..tensor_core.device_code import SOURCES as _COMMON

_HEAD = "__device__ __forceinline__ "


def _load(size: int) -> str:
    """Bytes that are loaded where something holds, else zeros."""
    if size == 2:
        return (
            "template <typename T>\n"
            f"{_HEAD}void tvmf_load_global_2(unsigned* values, int at, const T* global, int index, bool valid) {{\n"
            "#ifdef __CUDA_ARCH__\n"
            "  unsigned short narrow;\n"
            '  asm volatile("{ .reg .pred p;\\n"\n'
            '    "setp.ne.s32 p, %2, 0;\\n"\n'
            '    "mov.b16 %0, 0;\\n"\n'
            '    "@p ld.global.b16 %0, [%1]; }"\n'
            '    : "=&h"(narrow) : "l"(global + index), "r"((int)valid));\n'
            "  values[at] = narrow;\n"
            "#else\n"
            "  values[at] = 0;\n"
            "  if (valid) values[at] = *(const unsigned short*)(global + index);\n"
            "#endif\n}\n"
        )
    count = size // 4
    numbers = ", ".join(f"%{n}" for n in range(count))
    what, listed = ("b32", "%0") if count == 1 else (f"v{count}.b32", f"{{{numbers}}}")
    outputs = ", ".join(f'"=&r"(v[{n}])' for n in range(count))
    zeros = "".join(f'    "mov.b32 %{n}, 0;\\n"\n' for n in range(count))
    plain = outputs.replace("&", "")
    return (
        "template <typename R, typename T>\n"
        f"{_HEAD}void tvmf_load_global_{size}(R* values, int at, const T* global, int index, bool valid) {{\n"
        "  unsigned* v = (unsigned*)(values + at);\n"
        "#ifdef __CUDA_ARCH__\n"
        '  asm volatile("{ .reg .pred p;\\n"\n'
        f'    "setp.ne.s32 p, %{count + 1}, 0;\\n"\n'
        f"{zeros}"
        f'    "@p ld.global.{what} {listed}, [%{count}]; }}"\n'
        f'    : {outputs} : "l"(global + index), "r"((int)valid));\n'
        "#else\n"
        f"  for (int i = 0; i < {count}; ++i) v[i] = 0;\n"
        f'  if (valid) {{ asm volatile("ld.global.{what} {listed}, [%{count}];"'
        f' : {plain} : "l"(global + index)); }}\n'
        "#endif\n}\n"
    )


def _widen(dtype: str, count: int) -> str:
    """Numbers of 16 bits, two to a register, as float32."""
    if dtype == "float16":
        low = "__half2float(__ushort_as_half((unsigned short)({} & 0xffffu)))"
        high = "__half2float(__ushort_as_half((unsigned short)({} >> 16)))"
    else:
        low, high = "__uint_as_float({} << 16)", "__uint_as_float({} & 0xffff0000u)"
    lines = "".join(
        f"  wide[at + {n}] = {(high if n % 2 else low).format(f'narrow[index + {n // 2}]')};\n"
        for n in range(count)
    )
    name = f"tvmf_widen_{dtype}_{count}"
    return f"{_HEAD}void {name}(float* wide, int at, const unsigned* narrow, int index) {{\n{lines}}}\n"


def _multiply_add(count: int, data: int, weight: int) -> str:
    return (
        f"{_HEAD}void tvmf_multiply_add_{count}_{data}{weight}(float* sums, int at, const float* data, int i,\n"
        "    const float* weights, int j) {\n"
        "  #pragma unroll\n"
        f"  for (int n = 0; n < {count}; ++n)\n"
        f"    sums[at + n] += data[i + n * {data}] * weights[j + n * {weight}];\n}}\n"
    )


def load_global(size: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Load 2, 4, 8 or 16 bytes into registers: (registers, index, global, index, valid).

    Where they are not valid, registers become zero. Two bytes take a register of their own.
    """
    return _call(f"tvmf_load_global_{size}", _load(size), arguments)


def widen(dtype: str, count: int, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Convert neighbours of a 16-bit type to float32: (wide, index, registers, index)."""
    return _call(f"tvmf_widen_{dtype}_{count}", _widen(dtype, count), arguments)


def multiply_add(
    count: int, data: int, weight: int, *arguments: tirx.PrimExpr | int
) -> tirx.PrimExpr:
    """Add products to neighbouring sums: (sums, index, data, index, weights, index).

    Parameters
    ----------
    count : int
        How many.
    data, weight : int
        1 where each sum has a factor of its own, 0 where they share it.
    *arguments : PrimExpr or int
        See above.
    """
    name = f"tvmf_multiply_add_{count}_{data}{weight}"
    return _call(name, _multiply_add(count, data, weight), arguments)


def common(name: str, *arguments: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """Call one of the device functions of the tensor-core kernels."""
    return _call(name, _COMMON[name], arguments)


def _call(name: str, source: str, arguments: tuple) -> tirx.PrimExpr:
    return cuda_func_call(name, *arguments, source_code=source, return_type="void")
