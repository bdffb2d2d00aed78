"""A thread of a model's own, for what must not happen on the caller's.

TVM keeps the scratch memory of kernels that need some per thread: on a thread that serves one model
alone, no other model gets the memory that a captured graph writes to. And while the caller captures
a graph of his own, this thread may still allocate.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Worker:
    """Runs functions one after the other on one thread, which ends with this object.

    Parameters
    ----------
    prepare : callable
        Called once on the thread before anything else.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The thread must not hold this object, else it would never end.
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks,), name="tvm_fusion model", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False
        self.run(prepare)

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function on the thread and return its result, or raise what it raises."""
        if threading.current_thread() is self._thread:  # the garbage collector may call from it
            return function()
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._tasks.put((function, done))
        return done.result()


def _serve(tasks: queue.SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        function, done = task
        try:
            done.set_result(function())
        except BaseException as err:  # noqa: BLE001 - handed to the caller, who waits for it
            done.set_exception(err)
        del task, function, done  # they hold the model
