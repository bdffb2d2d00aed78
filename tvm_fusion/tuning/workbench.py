"""What builds candidates, makes references and measures: processes that live on from one model to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..build.library import find_linker
from ..compat import Target, process_cpu_count, tvm
from ..errors import TuningError
from ..targets import runs_here
from .builder import Builder
from .local_runner import LocalRunner
from .measure import Runner
from .processor import processor_name
from .reference import References
from .rpc_runner import RpcRunner
from .tuner import Device

#: Cores for each process that makes references, and how many there are at most: the loops of one run in parallel, what
#: is before and after does not.
_CORES_OF_REFERENCE, _MOST_REFERENCES = 4, 4


@dataclasses.dataclass(frozen=True)
class Remote:
    """Servers of TVM's RPC tracker.

    Attributes
    ----------
    host, port : str, int
        The tracker.
    key : str
        Key of the servers, all of which have the same device.
    """

    host: str
    port: int
    key: str


class Workbench:
    """Processes that build and measure candidates, for one model after another.

    They start at once, and are ready some seconds later; whoever asks before that waits. A context manager.

    Parameters
    ----------
    target : Target
        Complete target; only models for targets of its kind are tuned with this.
    remote : Remote, optional
        Where to measure; this machine when absent.
    devices : sequence of int, optional
        Numbers of the GPUs that measure, all alike; GPU 0 when absent.

    Attributes
    ----------
    builder, references, runner : Builder, References, Runner
        The processes.
    device : Device
        Where candidates are measured.
    kind : str
        Kind of the target.
    is_remote : bool
        Whether other machines measure.

    Raises
    ------
    ValueError
        If ``devices`` are none that measure together.
    TuningError
        If nothing can be measured there.
    CompilerError
        If there is no C++ compiler to link candidates with.
    """

    def __init__(
        self, target: Target, remote: Remote | None = None, devices: Sequence[int] | None = None
    ) -> None:
        self.kind, self.is_remote = target.kind.name, remote is not None
        numbers = check_devices(self.kind, remote, devices)
        find_linker()  # or every candidate would fail for want of one
        self.device = device_of(target, remote, numbers[0])
        with contextlib.ExitStack() as stack:
            self.runner: Runner
            if remote is not None:
                self.runner = RpcRunner(remote.host, remote.port, remote.key)
                stack.callback(self.runner.close)
            else:
                if not runs_here(target):
                    raise TuningError(
                        f"this machine has no device for {self.kind}; measure on another one with "
                        "--rpc HOST:PORT --key KEY"
                    )
                local = self.runner = stack.enter_context(LocalRunner(self.kind, numbers))
                local.launch()
            count = max(1, min(_MOST_REFERENCES, process_cpu_count() // _CORES_OF_REFERENCE))
            self.references = stack.enter_context(References(count))
            self.references.launch()
            self.builder = stack.enter_context(Builder())
            self.builder.launch()
            self._close = stack.pop_all().close

    def close(self) -> None:
        """End the processes."""
        self._close()

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_devices(
    kind: str, remote: Remote | None, devices: Sequence[int] | None
) -> tuple[int, ...]:
    """Numbers of the GPUs that measure together.

    Parameters
    ----------
    kind : str
        Kind of the target.
    remote : Remote or None
        Other machines that measure.
    devices : sequence of int or None
        What the user names; GPU 0 when absent.

    Raises
    ------
    ValueError
        If there is a choice of GPUs where none of this machine measures, or one is named twice.
    TuningError
        If there is no such GPU, or they are not alike.
    """
    if devices is None:
        return (0,)
    numbers = tuple(int(number) for number in devices)
    if remote is not None or kind != "cuda":
        where = "servers of a tracker" if remote is not None else f"target {kind}"
        raise ValueError(f"devices are GPUs of this machine; they do not go with {where}")
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ValueError(f"devices must be different numbers of GPUs, got {list(numbers)}")
    kinds = {number: _kind_of(number) for number in numbers}
    missing = [number for number, found in kinds.items() if not found]
    if missing:
        raise TuningError(f"this machine has no GPU {missing[0]}")
    other = next((n for n in numbers if kinds[n] != kinds[numbers[0]]), None)
    if other is not None:
        raise TuningError(
            f"GPUs that measure together must be alike: {numbers[0]} is {kinds[numbers[0]]}, "
            f"{other} is {kinds[other]}"
        )
    return numbers


def _kind_of(number: int) -> str:
    """Name and size of a GPU; empty where there is none."""
    device = tvm.cuda(number)
    if not device.exist:
        return ""
    return f"{device.device_name} with {device.multi_processor_count} multiprocessors"


def device_of(target: Target, remote: Remote | None, number: int = 0) -> Device:
    """The device whose times are meant."""
    if remote is not None:
        return Device(f"rpc:{remote.key}")
    if target.kind.name == "llvm":
        return _processor(json.loads(str(target)))
    device = tvm.cuda(number)
    if not device.exist:
        return Device(str(target.attrs["arch"]))
    return Device(str(device.device_name), _driver())


def _processor(target: Mapping[str, Any]) -> Device:
    """This machine's processor, with the features that a target in TVM's dict form names: they make other code."""
    mcpu = str(target.get("mcpu") or "")
    features = [f"mcpu={mcpu}"] if mcpu else []
    features += map(str, target.get("mattr") or ())
    return Device(", ".join([processor_name(), *features]), former=mcpu or "cpu")


def _driver() -> str:
    """Version of the NVIDIA driver; empty where the kernel does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"\b(\d{3}\.\d[\d.]*)\b", text)
    return match[1] if match else ""
