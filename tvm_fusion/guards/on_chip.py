"""Registers, shared memory and occupancy: estimated for every proposal, exact once compiled."""

from __future__ import annotations

import dataclasses

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict
from .footprint import footprint
from .needs import Footprint


@dataclasses.dataclass(frozen=True)
class Resources:
    """What the compiler says of one kernel; None where it says nothing.

    Parameters
    ----------
    registers : int or None
        32-bit registers of a thread.
    spill_bytes : int or None
        Bytes spilled to and reloaded from local memory, per thread.
    shared_bytes : int or None
        Shared memory of a block.
    threads : int or None
        Threads of a block.
    template : str or None
        Schedule template that made the kernel.
    error : str
        Why there is no kernel; empty if there is one.
    dynamic_shared : bool
        Whether the shared memory is sized at launch.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    template: str | None = None
    error: str = ""
    dynamic_shared: bool = False


class SharedMemory(Guard):
    """Refuses groups whose blocks need more shared memory than they get."""

    reason = "shared_memory"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if device.kind != "cuda":
            return ACCEPTED
        needs = footprint(graph, proposal, device)
        return _shared(needs, config, device, "estimated")


class Registers(Guard):
    """Refuses groups whose threads need more registers than they may have."""

    reason = "registers"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if device.kind != "cuda":
            return ACCEPTED
        return _registers(footprint(graph, proposal, device).registers, config, device, "estimated")


class Occupancy(Guard):
    """Refuses groups whose registers or shared memory leave too few threads on a multiprocessor."""

    reason = "occupancy"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if device.kind != "cuda":
            return ACCEPTED
        return _occupancy(footprint(graph, proposal, device), config, device, "estimated")


#: The template of last resort: right for any loop nests, and slow for products.
_LAST_RESORT = "fallback"


def judge_resources(
    found: Resources,
    needs: Footprint,
    config: FusionConfig,
    device: DeviceSpec,
    products: int = 0,
) -> Verdict:
    """Judge a compiled kernel.

    Parameters
    ----------
    found : Resources
        What the compiler says.
    needs : Footprint
        The estimate; its number of threads is used where the compiler's is unknown.
    config : FusionConfig
        The limits.
    device : DeviceSpec
        The device.
    products : int
        Convolutions and matrix products of the group: on a GPU it takes a template made for them.

    Returns
    -------
    Verdict
        The first limit that the kernel breaks: it cannot be built, spills, needs too much.
    """
    if found.error:
        return Verdict("unsupported", "no_template", {}, found.error)
    if device.kind != "cuda":
        return ACCEPTED
    if products and found.template == _LAST_RESORT:
        detail = "only the template of last resort takes it, which is slow for products"
        return Verdict("unsupported", "no_template", {"template": found.template}, detail)
    if found.spill_bytes:
        return Verdict(
            "unprofitable", "spill",
            {"spill_bytes": found.spill_bytes, "registers": found.registers},
            f"the compiler spills {found.spill_bytes} bytes a thread at {found.registers} registers",
        )  # fmt: skip
    exact = dataclasses.replace(
        needs,
        registers=found.registers or needs.registers,
        shared_bytes=needs.shared_bytes if found.shared_bytes is None else found.shared_bytes,
        threads=found.threads or needs.threads,
        dynamic_shared=needs.dynamic_shared if found.shared_bytes is None else found.dynamic_shared,
    )
    for verdict in (
        _registers(exact.registers, config, device, "compiled"),
        _shared(exact, config, device, "compiled"),
        _occupancy(exact, config, device, "compiled"),
    ):
        if not verdict.accepted:
            return verdict
    return ACCEPTED


def _shared(needs: Footprint, config: FusionConfig, device: DeviceSpec, source: str) -> Verdict:
    used = needs.shared_bytes
    most = device.shared_memory_per_block
    if needs.dynamic_shared:
        most = device.shared_memory_per_block_optin
    limit = min(config.max_shared_memory or most, most)  # an option cannot enlarge the chip
    if used <= limit:
        return ACCEPTED
    return Verdict(
        "unsupported" if used > most else "unprofitable", "shared_memory",
        {"shared_bytes": used, "max_shared_memory": limit, "source": source},
        f"a block would need {used} bytes of shared memory ({source}); the limit is {limit}",
    )  # fmt: skip


def _registers(used: int, config: FusionConfig, device: DeviceSpec, source: str) -> Verdict:
    limit = config.max_registers or device.max_registers_per_thread
    if not limit or used <= limit:
        return ACCEPTED
    return Verdict(
        "unprofitable", "registers",
        {"registers": used, "max_registers": limit, "source": source},
        f"a thread would need {used} registers ({source}); the limit is {limit}",
    )  # fmt: skip


def _occupancy(needs: Footprint, config: FusionConfig, device: DeviceSpec, source: str) -> Verdict:
    if needs.microseconds:
        # Tensor-core kernels copy asynchronously: few warps suffice, and the model of their tiles counts them.
        return ACCEPTED
    reached = needs.occupancy(device)
    if reached >= config.min_occupancy:
        return ACCEPTED
    # Small blocks are no fault of the group: nothing cut from it would have more threads resident.
    small = dataclasses.replace(needs, registers=1, shared_bytes=0)
    if needs.resident_blocks(device) == small.resident_blocks(device):
        return ACCEPTED
    return Verdict(
        "unprofitable", "occupancy",
        {
            "occupancy": round(reached, 4), "min_occupancy": config.min_occupancy,
            "registers": needs.registers, "shared_bytes": needs.shared_bytes,
            "threads": needs.threads, "source": source,
        },
        f"only {reached:.0%} of a multiprocessor's threads could be resident ({source})",
    )  # fmt: skip
