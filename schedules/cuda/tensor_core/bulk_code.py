"""Device functions of Hopper's copy engine, of its barriers in shared memory, and of the division of registers.

One PTX instruction each, but for the wait, which asks again until its phase is over. A wait names a *parity*: it is
over when the barrier's current phase has another one.
"""

from __future__ import annotations

from ....compat import cuda_func_call, tirx
from .device_code import SOURCES as COMMON

_HEAD = "__device__ __forceinline__ "
_ADDRESS = "(unsigned)__cvta_generic_to_shared((const char*)shared + {})"

#: Axes of a tensor map.
_RANKS = (2, 3, 4, 5)


def _sources() -> dict[str, str]:
    at = _ADDRESS.format("offset")
    made = {
        "tvmf_mbarrier_init": (
            "void tvmf_mbarrier_init(void* shared, int offset, int count) {\n"
            f"  unsigned address = {at};\n"
            '  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"\n'
            '               :: "r"(address), "r"(count) : "memory");\n}'
        ),
        # Other threads see the barriers after the block's own one; the copy engine does because of this.
        "tvmf_mbarrier_fence": (
            "void tvmf_mbarrier_fence() {\n"
            '  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");\n}'
        ),
        "tvmf_mbarrier_expect": (
            "void tvmf_mbarrier_expect(void* shared, int offset, int bytes) {\n"
            f"  unsigned address = {at};\n"
            '  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"\n'
            '               :: "r"(address), "r"(bytes) : "memory");\n}'
        ),
        "tvmf_mbarrier_arrive": (
            "void tvmf_mbarrier_arrive(void* shared, int offset) {\n"
            f"  unsigned address = {at};\n"
            '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address) : "memory");\n}'
        ),
        "tvmf_mbarrier_wait": (
            "void tvmf_mbarrier_wait(void* shared, int offset, int parity) {\n"
            f"  unsigned address = {at};\n"
            "  unsigned over;\n"
            "  do {\n"
            '    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; '
            'selp.u32 %0, 1, 0, p; }"\n'
            '                 : "=r"(over) : "r"(address), "r"(parity) : "memory");\n'
            "  } while (!over);\n}"
        ),
        "tvmf_map_prefetch": (
            "void tvmf_map_prefetch(const CUtensorMap& map) {\n"
            '  asm volatile("prefetch.tensormap [%0];" :: "l"((unsigned long long)&map) : "memory");\n}'
        ),
        # Slabs of 64 lines by 64 steps of the reduction, each of 128 bytes of lines: from one slab to the next, and
        # from eight steps to the next eight.
        "tvmf_wgmma_descriptor_across": (
            "unsigned long long tvmf_wgmma_descriptor_across(const void* shared, int offset) {\n"
            f"  unsigned address = {at};\n"
            "  return ((address & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62);\n}"
        ),
        "tvmf_warp_barrier": "void tvmf_warp_barrier() { __syncwarp(); }",
        "tvmf_wgmma_keep_1": (
            "void tvmf_wgmma_keep_1() {\n"
            '  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");\n}'
        ),
    }
    for rank in _RANKS:
        names = ", ".join(f"int c{axis}" for axis in range(rank))
        places = ", ".join(f"%{axis + 3}" for axis in range(rank))
        values = ", ".join(f'"r"(c{axis})' for axis in range(rank))
        made[f"tvmf_bulk_load_{rank}"] = (
            f"void tvmf_bulk_load_{rank}(void* shared, int offset, const CUtensorMap& map, int barrier, {names}) {{\n"
            f"  unsigned address = {at}, arrival = {_ADDRESS.format('barrier')};\n"
            f'  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile'
            f'.mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%2];"\n'
            '               :: "r"(address), "l"((unsigned long long)&map), "r"(arrival),\n'
            f'                  {values} : "memory");\n}}'
        )
    return {name: f"{_HEAD}{source}\n" for name, source in made.items()}


SOURCES: dict[str, str] = _sources()


def registers(direction: str, count: int) -> tirx.PrimExpr:
    """Return a call that gives registers of a warpgroup's threads back (``"dec"``) or takes more (``"inc"``)."""
    name = f"tvmf_registers_{direction}_{count}"
    source = f'{_HEAD}void {name}() {{ asm volatile("setmaxnreg.{direction}.sync.aligned.u32 {count};"); }}\n'
    return cuda_func_call(name, source_code=source)


def multiply(kind: str, columns: int, across: tuple[bool, bool], *arguments) -> tirx.PrimExpr:
    """Return a call of the instruction of a warpgroup, each operand of which may be transposed."""
    name, flags = f"tvmf_wgmma_{kind}_{columns}", "".join(str(int(flag)) for flag in across)
    if flags == "00":
        return call(name, *arguments)
    source = COMMON[name].replace(name, f"{name}_{flags}")
    source = source.replace("1, 1, 1, 0, 0;", f"1, 1, 1, {flags[0]}, {flags[1]};")
    return cuda_func_call(f"{name}_{flags}", *arguments, source_code=source, return_type="void")


def call(name: str, *arguments, result: str = "void") -> tirx.PrimExpr:
    """Return a call of a device function of this file or of ``device_code``."""
    source = SOURCES.get(name) or COMMON[name]
    return cuda_func_call(name, *arguments, source_code=source, return_type=result)
