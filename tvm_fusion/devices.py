"""Limits and speeds of known chips, with their sources.

The numbers are the makers' specifications, not measurements: planning ranks candidates with them,
measured time decides. This module imports neither TVM nor anything else of the package.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

#: CUDA compute capabilities (times ten) that a target may name. Those without an entry in
#: ``DEVICES`` borrow the nearest lower one.
KNOWN_CAPABILITIES: tuple[int, ...] = (
    70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121,
)  # fmt: skip

#: Key of a target for which products of float32 operands may be computed in TF32.
TF32 = "tf32"

_GUIDE = "CUDA C++ Programming Guide 13.0, table of compute capabilities"
_LAUNCH = "launch overhead of an empty kernel in a CUDA graph on an H200 (1.04 us), taken for all"


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """Limits and peak rates of one chip.

    Parameters
    ----------
    name : str
        Product whose speeds are given.
    kind : {"cuda", "llvm"}
        TVM target kind.
    arch : str
        Base arch (``"sm_90"``, never ``"sm_90a"``), or ``"cpu"``.
    multiprocessors : int
        Streaming multiprocessors, or CPU cores.
    registers_per_multiprocessor : int
        32-bit registers; 0 on a CPU, where no limit of this kind applies.
    max_registers_per_thread : int
        Registers that one thread may hold before it spills; 0 on a CPU.
    shared_memory_per_block : int
        Bytes that a block gets without opting in to more; on a CPU the level-1 data cache of one
        core.
    shared_memory_per_block_optin : int
        Bytes that a block may get at most (dynamic shared memory).
    shared_memory_per_multiprocessor : int
        Bytes shared by the resident blocks of one multiprocessor.
    max_threads_per_block, max_threads_per_multiprocessor, max_blocks_per_multiprocessor, warp_size
    : int
        Launch limits; all 1 on a CPU.
    cache_bytes : int
        Level-2 cache of a GPU, last-level cache of a CPU.
    memory_bandwidth : float
        Bytes per second to device memory.
    flops : tuple of (str, float)
        Peak FLOP/s by dtype: float16, bfloat16 and tf32 on tensor cores with float32 accumulation,
        the others on plain FMA units.
    launch_overhead : float
        Seconds that each kernel launch adds.
    source : str
        Where the numbers come from.
    estimated : bool
        Whether the entry stands in for a chip that is not in the table.
    tf32 : bool
        Whether products of float32 operands may be computed in TF32.
    """

    name: str
    kind: str
    arch: str
    multiprocessors: int
    registers_per_multiprocessor: int
    max_registers_per_thread: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_block: int
    max_threads_per_multiprocessor: int
    max_blocks_per_multiprocessor: int
    warp_size: int
    cache_bytes: int
    memory_bandwidth: float
    flops: tuple[tuple[str, float], ...]
    launch_overhead: float
    source: str
    estimated: bool = False
    tf32: bool = False

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s for ``dtype``; a dtype without an entry counts as float32."""
        rates = dict(self.flops)
        return rates.get(dtype, rates["float32"])


def _gpu(
    arch: int,
    name: str,
    *,
    multiprocessors: int,
    shared_kib: tuple[int, int],
    threads: int,
    blocks: int,
    cache_mib: float,
    bandwidth: float,
    teraflops: dict[str, float],
    source: str,
) -> DeviceSpec:
    """Build an entry; ``shared_kib`` is (block, multiprocessor), ``bandwidth`` in GB/s."""
    return DeviceSpec(
        name=name,
        kind="cuda",
        arch=f"sm_{arch}",
        multiprocessors=multiprocessors,
        registers_per_multiprocessor=65536,
        max_registers_per_thread=255,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared_kib[0] * 1024,
        shared_memory_per_multiprocessor=shared_kib[1] * 1024,
        max_threads_per_block=1024,
        max_threads_per_multiprocessor=threads,
        max_blocks_per_multiprocessor=blocks,
        warp_size=32,
        cache_bytes=int(cache_mib * 1024 * 1024),
        memory_bandwidth=bandwidth * 1e9,
        flops=tuple((dtype, rate * 1e12) for dtype, rate in teraflops.items()),
        launch_overhead=1.04e-6,
        source=f"{source}; {_GUIDE}; {_LAUNCH}",
    )


# Volta and Turing tensor cores take float16 only, so bfloat16 runs at the float32 rate there.
_GPUS = (
    _gpu(
        70,
        "NVIDIA V100 SXM2",
        multiprocessors=80,
        shared_kib=(96, 96),
        threads=2048,
        blocks=32,
        cache_mib=6,
        bandwidth=900,
        teraflops={"float64": 7.8, "float32": 15.7, "float16": 125},
        source="Tesla V100 GPU Architecture whitepaper WP-08608-001",
    ),
    _gpu(
        75,
        "NVIDIA T4",
        multiprocessors=40,
        shared_kib=(64, 64),
        threads=1024,
        blocks=16,
        cache_mib=4,
        bandwidth=320,
        teraflops={"float64": 0.25, "float32": 8.1, "float16": 65},
        source="Turing GPU Architecture whitepaper WP-09183-001, appendix Tesla T4",
    ),
    _gpu(
        80,
        "NVIDIA A100 SXM4 80GB",
        multiprocessors=108,
        shared_kib=(163, 164),
        threads=2048,
        blocks=32,
        cache_mib=40,
        bandwidth=2039,
        teraflops={"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312},
        source="A100 Tensor Core GPU Architecture whitepaper; A100 80GB datasheet",
    ),
    _gpu(
        86,
        "NVIDIA GeForce RTX 3090",
        multiprocessors=82,
        shared_kib=(99, 100),
        threads=1536,
        blocks=16,
        cache_mib=6,
        bandwidth=936,
        teraflops={"float64": 0.556, "float32": 35.6, "tf32": 35.6, "float16": 71, "bfloat16": 71},
        source="Ampere GA102 GPU Architecture whitepaper",
    ),
    _gpu(
        89,
        "NVIDIA GeForce RTX 4090",
        multiprocessors=128,
        shared_kib=(99, 100),
        threads=1536,
        blocks=24,
        cache_mib=72,
        bandwidth=1008,
        teraflops={
            "float64": 1.29,
            "float32": 82.6,
            "tf32": 82.6,
            "float16": 165.2,
            "bfloat16": 165.2,
        },
        source="Ada GPU Architecture whitepaper",
    ),
    _gpu(
        90,
        "NVIDIA H200 SXM",
        multiprocessors=132,
        shared_kib=(227, 228),
        threads=2048,
        blocks=32,
        cache_mib=50,
        bandwidth=4800,
        teraflops={"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989, "bfloat16": 989},
        source="H200 Tensor Core GPU datasheet (dense rates); H100 Architecture whitepaper",
    ),
    _gpu(
        100,
        "NVIDIA B200 SXM",
        multiprocessors=148,
        shared_kib=(227, 228),
        threads=2048,
        blocks=32,
        cache_mib=126,
        bandwidth=8000,
        teraflops={
            "float64": 37,
            "float32": 75,
            "tf32": 1125,
            "float16": 2250,
            "bfloat16": 2250,
        },
        source="HGX B200 datasheet (an eighth of the board's dense rates)",
    ),
    _gpu(
        120,
        "NVIDIA GeForce RTX 5090",
        multiprocessors=170,
        shared_kib=(99, 100),
        threads=1536,
        blocks=24,
        cache_mib=96,
        bandwidth=1792,
        teraflops={
            "float64": 1.64,
            "float32": 104.8,
            "tf32": 104.8,
            "float16": 209.5,
            "bfloat16": 209.5,
        },
        source="RTX Blackwell GPU Architecture whitepaper",
    ),
)

#: GPU entries by base arch.
DEVICES: dict[str, DeviceSpec] = {spec.arch: spec for spec in _GPUS}

#: A reference CPU. Fixed on purpose: a plan must not depend on the machine that makes it.
CPU = DeviceSpec(
    name="generic CPU, 8 cores",
    kind="llvm",
    arch="cpu",
    multiprocessors=8,
    registers_per_multiprocessor=0,
    max_registers_per_thread=0,
    shared_memory_per_block=32 * 1024,
    shared_memory_per_block_optin=32 * 1024,
    shared_memory_per_multiprocessor=32 * 1024,
    max_threads_per_block=1,
    max_threads_per_multiprocessor=1,
    max_blocks_per_multiprocessor=1,
    warp_size=1,
    cache_bytes=16 * 1024 * 1024,
    memory_bandwidth=51.2e9,
    flops=(("float64", 384e9), ("float32", 768e9), ("float16", 192e9), ("bfloat16", 192e9)),
    launch_overhead=1e-6,
    source="a reference point, not a product: 8 cores at 3 GHz with two 256-bit FMA units each, "
    "two channels of DDR4-3200; half types are emulated through float32",
    estimated=True,
)


def capability(arch: str) -> int:
    """Compute capability times ten of an arch name: 90 for ``"sm_90a"``.

    Raises
    ------
    ValueError
        If the name is no CUDA arch of ``KNOWN_CAPABILITIES``; the message lists those.
    """
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    # The "a" variants start with Hopper, the "f" (family) variants with Blackwell.
    first = {"": 0, "a": 90, "f": 100}
    if match and int(match[1]) in KNOWN_CAPABILITIES and int(match[1]) >= first[match[2]]:
        return int(match[1])
    known = ", ".join(f"sm_{number}" for number in KNOWN_CAPABILITIES)
    raise ValueError(
        f"unknown CUDA arch {arch!r}; use one of {known} (from sm_90 on also as sm_90a)"
    )


def base_arch(arch: str) -> str:
    """Arch without its letter (``"sm_90"`` for ``"sm_90a"``): the key of device tables and records.

    Raises
    ------
    ValueError
        If the arch is unknown.
    """
    return f"sm_{capability(arch)}"


def device_for(target: Any) -> DeviceSpec:
    """Return the table entry for a TVM target.

    Parameters
    ----------
    target : tvm.target.Target
        Of kind ``llvm`` or ``cuda``. An ``llvm`` target with ``num-cores`` scales the reference
        CPU. A ``cuda`` target with the key ``tf32`` allows TF32 (see ``targets.with_products``).

    Returns
    -------
    DeviceSpec
        The entry of the target's arch; for an arch without one, that of the nearest lower arch with
        its own ``arch`` and ``estimated=True``.

    Raises
    ------
    ValueError
        If the target is of another kind or its arch is unknown.
    """
    kind = target.kind.name
    if kind == "llvm":
        cores = int(target.attrs.get("num-cores", CPU.multiprocessors))
        rates = tuple((dtype, rate * cores / CPU.multiprocessors) for dtype, rate in CPU.flops)
        name = CPU.name if cores == CPU.multiprocessors else f"generic CPU, {cores} cores"
        return dataclasses.replace(CPU, name=name, multiprocessors=cores, flops=rates)
    if kind != "cuda":
        raise ValueError(f"no device of kind {kind!r} is known; use a target of kind llvm or cuda")
    number = capability(str(target.attrs["arch"]))
    nearest = max(known for known in map(capability, DEVICES) if known <= number)
    spec = DEVICES[f"sm_{nearest}"]
    if nearest != number:
        spec = dataclasses.replace(spec, arch=f"sm_{number}", estimated=True)
    return dataclasses.replace(spec, tf32=True) if TF32 in target.keys else spec
