"""The one way in which every contender is timed.

- *warm*: one CUDA graph holds 20 back-to-back copies of the workload on the same buffers; median of
  30 replays, divided by 20.
- *cold*: a graph of one copy; 512 MiB are written before each replay; median of 30. It carries the
  overhead of a replay, so cold times compare with cold times only.
- *call*: 20 calls one after another without a graph, then one synchronisation, by the host's clock;
  median of 10, divided by 20.

Of a workload so slow that this takes more than a second, fewer replays and repeats count.
Without a GPU only the host's clock is left: warm and call are both calls without a graph.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from cuda_driver import Driver

COPIES, REPLAYS, CALL_REPEATS = 20, 30, 10
FLUSH_BYTES = 512 << 20
#: Seconds of replays before a measurement, in which the clocks rise. Contenders are measured one right
#: after another, so the device is not idle before either.
WARM_UP = 0.02
#: Seconds that the replays of one measurement may take, unless they are ``LEAST`` or fewer.
LONGEST, LEAST = 1.0, 5


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds per call of the workload.

    Attributes
    ----------
    warm, cold, call : float
        As the module says; ``cold`` is absent where there is no GPU.
    replay : float or None
        *call* of a contender's own way of replaying a graph, where it has one.
    """

    warm: float
    cold: float | None
    call: float
    replay: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """As plain values."""
        return {k: None if v is None else round(v, 4) for k, v in dataclasses.asdict(self).items()}


class CudaClock:
    """Times graphs on a stream of the current CUDA context.

    Parameters
    ----------
    stream : int
        Handle of the stream to replay on; a new one when absent.
    flush_bytes : int
        Bytes written before each cold replay.
    """

    def __init__(self, stream: int | None = None, flush_bytes: int = FLUSH_BYTES) -> None:
        self.cuda = Driver()
        self.stream = (
            self.cuda.handle("cuStreamCreate", 1) if stream is None else ctypes.c_void_p(stream)
        )
        self._events = [
            [self.cuda.handle("cuEventCreate", 0) for _ in range(2)] for _ in range(REPLAYS)
        ]
        self.flush_bytes = flush_bytes
        self._flush_address = ctypes.c_uint64()
        self.cuda("cuMemAlloc", ctypes.byref(self._flush_address), ctypes.c_size_t(flush_bytes))

    def sync(self) -> None:
        """Wait for the stream."""
        self.cuda("cuStreamSynchronize", self.stream)

    def flush(self) -> None:
        """Enqueue a write of more bytes than any cache holds."""
        words = ctypes.c_size_t(self.flush_bytes // 4)
        self.cuda("cuMemsetD32Async", self._flush_address, ctypes.c_uint(1), words, self.stream)

    def launch(self, graph: ctypes.c_void_p) -> None:
        """Enqueue a replay."""
        self.cuda("cuGraphLaunch", graph, self.stream)

    def begin_capture(self) -> None:
        """Begin to capture the stream (relaxed: what is allocated meanwhile stays allowed)."""
        self.cuda("cuStreamBeginCapture", self.stream, 2)

    def end_capture(self) -> ctypes.c_void_p:
        """End the capture and return the graph, ready to launch."""
        graph = ctypes.c_void_p()
        self.cuda("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        executable = self.instantiate(graph)
        self.cuda("cuGraphDestroy", graph)
        return executable

    def instantiate(self, graph: ctypes.c_void_p) -> ctypes.c_void_p:
        """Make a captured graph ready to launch."""
        return self.cuda.handle("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))

    def nodes(self, graph: ctypes.c_void_p) -> int:
        """Number of a captured graph's nodes."""
        count = ctypes.c_size_t()
        self.cuda("cuGraphGetNodes", graph, None, ctypes.byref(count))
        return count.value

    def chain(self, graph: ctypes.c_void_p, copies: int) -> ctypes.c_void_p:
        """Put a captured graph into a new one, some times one after another, ready to launch."""
        whole = self.cuda.handle("cuGraphCreate", ctypes.c_uint(0))
        try:
            before = ctypes.c_void_p()
            for i in range(copies):
                node = ctypes.c_void_p()
                self.cuda(
                    "cuGraphAddChildGraphNode", ctypes.byref(node), whole,
                    ctypes.byref(before), ctypes.c_size_t(min(i, 1)), graph,
                )  # fmt: skip
                before = node
            return self.instantiate(whole)
        finally:
            self.cuda("cuGraphDestroy", whole)

    def fill(self, address: int, size: int) -> None:
        """Enqueue writing NaN (of any float type) to some bytes."""
        self.cuda(
            "cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(255), ctypes.c_size_t(size),
            self.stream,
        )  # fmt: skip

    def destroy(self, graph: ctypes.c_void_p) -> None:
        """Free a graph."""
        self.cuda("cuGraphExecDestroy", graph)

    def replays(self, launch: Callable[[], None], *, cold: bool) -> list[float]:
        """Microseconds of each of 30 replays, enqueued without waiting in between.

        So the host's own time is hidden behind the replay (or the flush) before.
        """
        events = self._events[: number_in_time(self._warm_up(launch), REPLAYS)]
        for first, last in events:
            if cold:
                self.flush()
            self.cuda("cuEventRecord", first, self.stream)
            launch()
            self.cuda("cuEventRecord", last, self.stream)
        self.sync()
        passed, times = ctypes.c_float(), []
        for pair in events:
            self.cuda("cuEventElapsedTime", ctypes.byref(passed), *pair)
            times.append(passed.value * 1e3)
        return times

    def _warm_up(self, launch: Callable[[], None]) -> float:
        """Replay for a while; return the seconds of one replay, the host's wait included."""
        launch()
        self.sync()
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() < begin + WARM_UP:
            launch()
            self.sync()
            count += 1
        seconds = (time.perf_counter() - begin) / count
        for _ in range(2):  # the device is busy when the first event is enqueued
            launch()
        return seconds

    def measure(
        self,
        many: Callable[[], None],
        one: Callable[[], None],
        call: Callable[[], Any],
        copies: int = COPIES,
    ) -> Times:
        """Time a workload: launchers of the graph of 20 copies and of the graph of one, and a call."""
        warm = statistics.median(self.replays(many, cold=False)) / copies
        cold = statistics.median(self.replays(one, cold=True))
        return Times(warm, cold, call_time(call, self.sync))


def number_in_time(seconds: float, most: int) -> int:
    """How many runs of some seconds each make a measurement: ``most``, or fewer if they are long."""
    return max(LEAST, min(most, int(LONGEST / max(seconds, 1e-9))))


def call_time(call: Callable[[], Any], sync: Callable[[], None]) -> float:
    """Microseconds per call of calls without a graph (*call* of the protocol)."""
    call()
    sync()
    begin, times = time.perf_counter(), []
    call()
    sync()
    for _ in range(number_in_time((time.perf_counter() - begin) * COPIES, CALL_REPEATS)):
        start = time.perf_counter()
        for _ in range(COPIES):
            call()
        sync()
        times.append((time.perf_counter() - start) * 1e6 / COPIES)
    return statistics.median(times)


def cpu_times(call: Callable[[], Any], seconds: float = 0.5, most: int = 30) -> Times:
    """Time a workload on a CPU: median of single calls, for about ``seconds``."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < most and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    middle = statistics.median(times)
    return Times(middle, None, middle)
