"""Device functions that tensor-core kernels call: one PTX instruction each, named after it.

TVM prints the source of each function that a kernel calls in front of the kernel. Addresses are a pointer and an
offset (bytes of shared memory, elements of anything else), so that TVM's passes see the use of a whole buffer and do
not shrink it. Shared-memory instructions are volatile
and barriers are functions too: what TVM cannot see, it adds no barriers for.
"""

from __future__ import annotations

from ....compat import cuda_func_call, tirx

#: Types of operands by the name that PTX has for them, and the depth of one instruction.
OPERAND_TYPES: dict[str, tuple[str, int]] = {
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
    "float32": ("tf32", 8),
}

_HEAD = "__device__ __forceinline__ "
_SHARED = "(unsigned)__cvta_generic_to_shared((const char*)shared + offset)"


def _sources() -> dict[str, str]:
    """Source of each device function by its name."""
    made: dict[str, str] = {
        "tvmf_commit": 'void tvmf_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }',
        "tvmf_barrier": "void tvmf_barrier() { __syncthreads(); }",
        "tvmf_store_shared_16": (
            "void tvmf_store_shared_16(void* shared, int offset, const void* values) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  const unsigned* v = (const unsigned*)values;\n"
            '  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"\n'
            '               :: "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");\n}'
        ),
        # The first element stands in for what is not there: a choice of addresses needs no branch.
        "tvmf_read_or_zero_2": (
            "template <typename T>\n"
            f"{_HEAD}unsigned short tvmf_read_or_zero_2(const T* global, int index, bool valid) {{\n"
            "  unsigned short value = ((const unsigned short*)global)[valid ? index : 0];\n"
            "  return valid ? value : (unsigned short)0;\n}"
        ),
        "tvmf_store_shared_2": (
            "void tvmf_store_shared_2(void* shared, int offset, unsigned short value) {\n"
            "  *(unsigned short*)((char*)shared + offset) = value;\n}"
        ),
        "tvmf_load_shared_word": (
            "unsigned tvmf_load_shared_word(const void* shared, int offset) {\n"
            "  return *(const unsigned*)((const char*)shared + offset);\n}"
        ),
        # What is computed from it is computed anew, not kept in registers, and not before what stands in front.
        "tvmf_again": (
            "int tvmf_again(int value) {\n"
            '  asm volatile("" : "+r"(value) :: "memory");\n  return value;\n}'
        ),
        "tvmf_store_shared_8": (
            "void tvmf_store_shared_8(void* shared, int offset, const float* values, int index) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  const unsigned* v = (const unsigned*)(values + index);\n"
            '  asm volatile("st.shared.v2.b32 [%0], {%1, %2};"\n'
            '               :: "r"(address), "r"(v[0]), "r"(v[1]) : "memory");\n}'
        ),
        "tvmf_load_shared_8": (
            "void tvmf_load_shared_8(float* values, int index, const void* shared, int offset) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  unsigned* v = (unsigned*)(values + index);\n"
            '  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"\n'
            '               : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");\n}'
        ),
    }
    made.update(_cluster_sources())
    for size in (4, 8, 16):
        # Only 16-byte copies may bypass the first-level cache.
        cache = "cg" if size == 16 else "ca"
        made[f"tvmf_copy_async_{size}"] = (
            "template <typename T>\n"
            f"{_HEAD}void tvmf_copy_async_{size}(void* shared, int offset, const T* global, int index, bool valid) {{\n"
            f"  unsigned address = {_SHARED};\n"
            "  // A source size of 0 reads nothing and writes zeros.\n"
            f"  int bytes = valid ? {size} : 0;\n"
            f'  asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"\n'
            '               :: "r"(address), "l"(global + index), "r"(bytes) : "memory");\n}'
        )
    for name, instruction in (
        ("wait_for_previous", "wait"),
        ("let_next_start", "launch_dependents"),
    ):
        made[f"tvmf_{name}"] = (
            f"void tvmf_{name}() {{\n"
            "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n"
            f'  asm volatile("griddepcontrol.{instruction};" ::: "memory");\n'
            "#endif\n}"
        )
    made["tvmf_select"] = (
        "template <typename T>\n"
        f"{_HEAD}void* tvmf_select(bool own, T* one, int shift, void* other) {{\n"
        "  return own ? (void*)(one + shift) : other;\n}"
    )
    for size, vector in ((2, "ushort"), (4, "unsigned"), (8, "uint2"), (16, "uint4")):
        made[f"tvmf_store_global_{size}"] = (
            "template <typename T>\n"
            f"{_HEAD}void tvmf_store_global_{size}(void* global, int index, const T* values) {{\n"
            f"  *({vector}*)((T*)global + index) = *(const {vector}*)values;\n}}"
        )
    for left in range(8):
        made[f"tvmf_wait_{left}"] = (
            f'void tvmf_wait_{left}() {{ asm volatile("cp.async.wait_group {left};" ::: "memory"); }}'
        )
    for name, suffix in (("", ""), ("_trans", ".trans")):
        made[f"tvmf_ldmatrix{name}"] = (
            f"void tvmf_ldmatrix{name}(unsigned* fragments, int index, const void* shared, int offset) {{\n"
            f"  unsigned address = {_SHARED};\n"
            "  unsigned* fragment = fragments + index;\n"
            f'  asm volatile("ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%0, %1, %2, %3}}, [%4];"\n'
            '               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])\n'
            '               : "r"(address) : "memory");\n}'
        )
    for ptx in ("f16", "bf16"):
        made[f"tvmf_mma_{ptx}"] = (
            f"void tvmf_mma_{ptx}(float* sums, int at, const unsigned* rows, int row,\n"
            "    const unsigned* columns, int column) {\n"
            "  float* d = sums + at;\n  const unsigned *a = rows + row, *b = columns + column;\n"
            f'  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{ptx}.{ptx}.f32 "\n'
            '               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"\n'
            '               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])\n'
            '               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));\n}'
        )
    made.update(_tf32_sources())
    made["tvmf_mma_tf32"] = (
        "void tvmf_mma_tf32(float* sums, int at, const unsigned* rows, int row,\n"
        "    const unsigned* columns, int column) {\n"
        "  float* d = sums + at;\n  const unsigned *a = rows + row, *b = columns + column;\n"
        '  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "\n'
        '               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"\n'
        '               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])\n'
        '               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));\n}'
    )
    return {
        name: (source if source.startswith("template") else _HEAD + source) + "\n"
        for name, source in made.items()
    }


def _tf32_sources() -> dict[str, str]:
    """Functions that read fragments of float32 elements, rounded to TF32.

    ``mma`` ignores the last 13 bits of a TF32 operand, so that adding half of what they count rounds to nearest (ties
    away from zero, as ``cvt.rna.tf32``, without its instruction that clears them). From sm_90 on, ``cvt.rn.tf32``
    (ties to even) is a single instruction.
    """
    return {
        "tvmf_ldmatrix_tf32": (
            "void tvmf_ldmatrix_tf32(unsigned* fragments, int index, const void* shared, int offset) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  unsigned* fragment = fragments + index;\n"
            '  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"\n'
            '               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])\n'
            f'               : "r"(address) : "memory");\n{_ROUND}}}'
        ),
        "tvmf_load_words_tf32": (
            "void tvmf_load_words_tf32(unsigned* fragments, int index, const void* shared, int first,\n"
            "    int second, int third, int fourth) {\n"
            "  unsigned* fragment = fragments + index;\n"
            "  const int offsets[] = {first, second, third, fourth};\n"
            "#pragma unroll\n"
            "  for (int i = 0; i < 4; ++i) {\n"
            f"    unsigned address = {_SHARED.replace('offset', 'offsets[i]')};\n"
            '    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(fragment[i]) : "r"(address) : "memory");\n'
            f"  }}\n{_ROUND}}}"
        ),
    }


#: Rounds the four registers of ``fragment``.
_ROUND = (
    "#pragma unroll\n"
    "  for (int i = 0; i < 4; ++i) {\n"
    "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n"
    '    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(fragment[i]) : "f"(__uint_as_float(fragment[i])));\n'
    "#else\n"
    "    // Infinities and NaNs stay what they are.\n"
    "    if (fabsf(__uint_as_float(fragment[i])) < __uint_as_float(0x7f800000u)) fragment[i] += 0x1000u;\n"
    "#endif\n"
    "  }\n"
)


def _cluster_sources() -> dict[str, str]:
    """Functions with which the threads of a row, of one block or of the blocks of a cluster, exchange numbers."""
    made = {
        "tvmf_shuffle_xor": (
            "float tvmf_shuffle_xor(float value, int bits) {\n"
            "  return __shfl_xor_sync(0xffffffffu, value, bits);\n}"
        ),
        "tvmf_store_shared_4": (
            "void tvmf_store_shared_4(void* shared, int offset, float value) {\n"
            f"  unsigned address = {_SHARED};\n"
            '  asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");\n}'
        ),
        "tvmf_load_shared_16": (
            "void tvmf_load_shared_16(float* values, int index, const void* shared, int offset) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  float* v = values + index;\n"
            '  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"\n'
            '               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address) : "memory");\n}'
        ),
        # The same place in the shared memory of another block of the cluster.
        "tvmf_store_cluster_4": (
            "void tvmf_store_cluster_4(void* shared, int offset, float value, int rank) {\n"
            f"  unsigned address = {_SHARED};\n"
            '  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));\n'
            '  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");\n}'
        ),
    }
    for count, operands in ((2, "{%1, %2}"), (4, "{%1, %2, %3, %4}")):
        values = ", ".join(f'"f"(v[{number}])' for number in range(count))
        made[f"tvmf_store_cluster_{4 * count}"] = (
            f"void tvmf_store_cluster_{4 * count}(void* shared, int offset, const float* values, int index,\n"
            "    int rank) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  const float* v = values + index;\n"
            '  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));\n'
            f'  asm volatile("st.shared::cluster.v{count}.f32 [%0], {operands};"\n'
            f'               :: "r"(address), {values} : "memory");\n}}'
        )
    for name, what in (
        ("tvmf_cluster_begin", "arrive.relaxed"),
        ("tvmf_cluster_arrive", "arrive.release"),
        ("tvmf_cluster_wait", "wait.acquire"),
    ):
        made[name] = (
            f'void {name}() {{ asm volatile("barrier.cluster.{what}.aligned;" ::: "memory"); }}'
        )
    return made


#: Columns of a warpgroup's instruction.
WARPGROUP_COLUMNS = tuple(range(8, 257, 8))


def _warpgroup_sources() -> dict[str, str]:
    """Source of the device functions of sm_90a's warpgroup instructions."""
    made = {
        "tvmf_fence_async": (
            'void tvmf_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }'
        ),
        "tvmf_wgmma_fence": (
            'void tvmf_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }'
        ),
        "tvmf_wgmma_commit": (
            "void tvmf_wgmma_commit() {\n"
            '  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");\n}'
        ),
        "tvmf_to_1024": (
            "int tvmf_to_1024(const void* shared) {\n"
            "  return -(int)__cvta_generic_to_shared(shared) & 1023;\n}"
        ),
        "tvmf_wgmma_descriptor": (
            "unsigned long long tvmf_wgmma_descriptor(const void* shared, int offset) {\n"
            f"  unsigned address = {_SHARED};\n"
            "  // Rows of 128 bytes whose pieces are exchanged, eight of them every 1024 bytes.\n"
            "  return ((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);\n}"
        ),
    }
    for columns in WARPGROUP_COLUMNS:
        count = columns // 2
        pins = "\n".join(f'  asm volatile("" : "+f"(sums[{i}]) :: "memory");' for i in range(count))
        made[f"tvmf_wgmma_wait_{columns}"] = (
            f"void tvmf_wgmma_wait_{columns}(float* sums) {{\n"
            '  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
            f"  // Nothing that reads the sums moves in front of the wait.\n{pins}\n}}"
        )
        registers = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        for ptx in ("f16", "bf16"):
            made[f"tvmf_wgmma_{ptx}_{columns}"] = (
                f"void tvmf_wgmma_{ptx}_{columns}(float* sums, int at, unsigned long long rows,\n"
                "    unsigned long long columns) {\n"
                "  float* d = sums + at;\n"
                f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} "\n'
                f'      "{{{registers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"\n'
                f'      : {outputs} : "l"(rows), "l"(columns));\n}}'
            )
    return {name: f"{_HEAD}{source}\n" for name, source in made.items()}


#: CUDA source of each device function by its name.
SOURCES: dict[str, str] = {**_sources(), **_warpgroup_sources()}


def call(name: str, *arguments: tirx.PrimExpr | int, result: str = "void") -> tirx.PrimExpr:
    """Return a call of a device function.

    Parameters
    ----------
    name : str
        One of ``SOURCES``.
    *arguments : PrimExpr or int
        Its arguments; a buffer is passed by its data pointer.
    result : str
        Type that it returns.
    """
    return cuda_func_call(name, *arguments, source_code=SOURCES[name], return_type=result)
