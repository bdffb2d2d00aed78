"""Device functions of attention kernels, beside those of products (`tensor_core.device_code`)."""

from __future__ import annotations

from ....compat import cuda_func_call, tirx
from ..tensor_core.device_code import SOURCES as PRODUCTS

_HEAD = "__device__ __forceinline__ "

_OWN = {
    "tvmf_exp2": (
        "float tvmf_exp2(float x) {\n"
        "  float y = x;\n"
        "#ifdef __CUDA_ARCH__\n"
        '  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));\n'
        "#else\n"
        "  y = exp2f(y);\n"
        "#endif\n"
        "  return y;\n}"
    ),
    "tvmf_pack_f16": (
        "void tvmf_pack_f16(unsigned* packed, int at, const float* values, int index) {\n"
        "  half2 pair = __floats2half2_rn(values[index], values[index + 1]);\n"
        "  packed[at] = *(const unsigned*)&pair;\n}"
    ),
    "tvmf_pack_bf16": (
        "void tvmf_pack_bf16(unsigned* packed, int at, const float* values, int index) {\n"
        "  __nv_bfloat162 pair = __floats2bfloat162_rn(values[index], values[index + 1]);\n"
        "  packed[at] = *(const unsigned*)&pair;\n}"
    ),
    "tvmf_store_packed": (
        "template <typename T>\n"
        f"{_HEAD}void tvmf_store_packed(T* global, int index, const unsigned* packed, int at) {{\n"
        "  *(unsigned*)(global + index) = packed[at];\n}"
    ),
}

#: CUDA source of each device function by its name.
SOURCES: dict[str, str] = {
    **PRODUCTS,
    **{
        name: (source if source.startswith("template") else _HEAD + source) + "\n"
        for name, source in _OWN.items()
    },
}


def call(name: str, *arguments: tirx.PrimExpr | int, result: str = "void") -> tirx.PrimExpr:
    """Return a call of a device function, one of ``SOURCES``; a buffer is passed by its data pointer."""
    return cuda_func_call(name, *arguments, source_code=SOURCES[name], return_type=result)
