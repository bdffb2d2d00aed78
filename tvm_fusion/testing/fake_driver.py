"""A stand-in for the CUDA driver on machines without a GPU: graphs are functions, memory is the host's.

It lets tests run everything above the driver: which graphs are captured, on what buffers, what is
copied, and in which order streams wait for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from ..build.cuda_driver import CudaError, Graph


class FakeDriver:
    """Records what it is asked to do, and does it at once.

    Attributes
    ----------
    calls : list of tuple
        Name and arguments of each call, in order; without those that only ask.
    capturing : set of int
        Streams that "someone else" captures.
    refuse : str
        If not empty, captures fail with this message.
    seconds : float
        What everything takes that is timed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.capturing: set[int] = set()
        self.refuse = ""
        self.seconds = 1.0
        self._streams = 100
        self._graphs = 0
        self._runs: dict[int, Callable[[], None]] = {}

    def names(self) -> list[str]:
        """Names of the calls so far; forgets them."""
        found = [name for name, *_ in self.calls]
        self.calls.clear()
        return found

    def enter_worker(self) -> None:
        """Nothing to prepare."""

    def create_stream(self) -> int:
        """Return a new number."""
        self._streams += 1
        return self._streams

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Record the stream on which TVM would launch."""
        self.calls.append(("use", stream))
        yield

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is in `capturing`."""
        return stream in self.capturing

    def capture(self, run: Callable[[], None], stream: int, kernels: int) -> Graph:
        """Keep the function as the graph, after a first run."""
        if self.refuse:
            raise CudaError(self.refuse)
        self.calls.append(("capture", stream, kernels))
        self._graphs += 1
        self._runs[self._graphs] = run
        return Graph(ctypes.c_void_p(self._graphs), _forget)

    def launch(self, graph: Graph, stream: int) -> None:
        """Run the function."""
        self.calls.append(("launch", graph.handle.value, stream))
        before = len(self.calls)
        self._runs[graph.handle.value or 0]()
        del self.calls[before:]  # what is in a graph is no call of its own

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy in the host's memory."""
        self.calls.append(("copy", size, stream))
        ctypes.memmove(target, source, size)

    def clear(self, target: int, size: int, stream: int, byte: int = 0) -> None:
        """Set host memory."""
        ctypes.memset(target, byte, size)

    def order(self, before: int, after: int) -> None:
        """Record that one stream waits for another."""
        self.calls.append(("order", before, after))

    def synchronize(self, stream: int) -> None:
        """Record that the host waits."""
        self.calls.append(("synchronize", stream))

    def synchronize_all(self) -> None:
        """Nothing runs."""

    def time(self, run: Callable[[], None], stream: int) -> float:
        """Run, and pretend that it took a second."""
        return self.times(run, stream, 1)[0]

    def times(
        self, run: Callable[[], None], stream: int, repeat: int, ahead: int = 0
    ) -> list[float]:
        """Run, and pretend that each run took `seconds`."""
        for _ in range(ahead + repeat):
            run()
        return [self.seconds] * repeat


def _forget(handle: ctypes.c_void_p) -> None:
    """There is nothing to destroy."""
