"""What a schedule template is, and the numbers of the target that templates use."""

from __future__ import annotations

import abc
import dataclasses
import re
from typing import ClassVar

from ..compat import Target, s_tir, tirx
from ..devices import device_for

#: Attribute of a function: numbers of the parameters that are constants wherever it is called.
CONSTANTS = "tvm_fusion.constants"

#: Attribute of a scheduled function: the permutation of each parameter that it wants permuted, by its number.
PACKED = "tvm_fusion.packed"

#: Attribute of a function that becomes one of several members of a kernel, side by side: its kernel has no clusters,
#: and asks for no more shared memory than it uses.
MEMBER = "tvm_fusion.member"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Numbers of a GPU target that bound a schedule.

    Parameters
    ----------
    threads : int
        Largest number of threads in a block.
    warp : int
        Threads in a warp.
    shared_bytes : int
        Static shared memory of a block in bytes.
    resident_shared_bytes : int
        Shared memory of the blocks that are resident on a multiprocessor together, in bytes.
    multiprocessors : int
        Multiprocessors of the chip that the arch stands for: how many thread blocks keep it busy.
    dynamic_shared_bytes : int
        Dynamic shared memory that a block may ask for, in bytes.
    registers : int
        Registers of a multiprocessor.
    """

    threads: int
    warp: int
    shared_bytes: int
    resident_shared_bytes: int
    multiprocessors: int
    dynamic_shared_bytes: int = 0
    registers: int = 65536


def limits(target: Target) -> Limits:
    """Read the limits of a GPU target.

    Parameters
    ----------
    target : Target
        A CUDA target with an arch. What it does not state comes from the device table.

    Returns
    -------
    Limits
    """
    attrs = target.attrs
    device = device_for(target)
    threads = attrs.get("max_threads_per_block", device.max_threads_per_block)
    shared = attrs.get("max_shared_memory_per_block", device.shared_memory_per_block)
    return Limits(
        threads=int(threads),
        warp=int(attrs.get("thread_warp_size", device.warp_size)),
        # What a block gets beyond this is dynamic shared memory, counted apart (`dynamic_shared_bytes`).
        shared_bytes=min(int(shared), device.shared_memory_per_block),
        resident_shared_bytes=device.shared_memory_per_multiprocessor,
        multiprocessors=device.multiprocessors,
        dynamic_shared_bytes=device.shared_memory_per_block_optin,
        registers=device.registers_per_multiprocessor,
    )


def arch_number(target: Target) -> int:
    """Return 90 for a target with arch ``sm_90a``, 0 when the target names no CUDA arch."""
    match = re.match(r"sm_(\d+)", str(target.attrs.get("arch", "")))
    return int(match.group(1)) if match else 0


class ScheduleTemplate(abc.ABC):
    """One way of turning an unscheduled PrimFunc into a scheduled one.

    A subclass sets ``name`` and ``kind`` and implements ``apply``. Templates hold no state, so one object serves
    every function.
    """

    #: Unique name, as it appears in plans and records.
    name: ClassVar[str]
    #: Kind of the targets that it writes code for, ``"cuda"`` or ``"llvm"``.
    kind: ClassVar[str]
    #: Smallest compute capability times ten that has the instructions it uses; None when any does.
    min_arch: ClassVar[int | None] = None

    def accepts(self, target: Target) -> bool:
        """Say whether this template may write code for a target: of its kind, and new enough.

        Parameters
        ----------
        target : Target
            Complete target.
        """
        if target.kind.name != self.kind:
            return False
        return self.min_arch is None or arch_number(target) >= self.min_arch

    @abc.abstractmethod
    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Schedule one function.

        Parameters
        ----------
        func : tirx.PrimFunc
            Unscheduled, in the block form of TVM's LegalizeOps and FuseTIR. It is left untouched.
        target : Target
            A target that ``accepts`` said yes to.

        Returns
        -------
        s_tir.Schedule or tirx.PrimFunc or None
            The scheduled function, or None when this template does not fit the function.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"
