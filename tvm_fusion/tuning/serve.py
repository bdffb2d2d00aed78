"""The child's side of a worker process: JSON lines on standard input and output.

The first answer says that the worker is ready. Every request is ``{"limit": seconds, "request":
{...}}`` and every answer ``{"answer": {"verdict": ..., ...}}``. While a request is carried out the
worker may say ``{"extend": seconds, "stage": name}``: what follows has that much time from now on.
This module imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]

#: A worker whose parent is gone ends itself this many seconds after a request should have been done.
_GRACE = 30


class Channel:
    """Where answers go."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def extend(self, seconds: float, stage: str) -> None:
        """Give the next stage of the request in hand this much time from now on."""
        _alarm(seconds)
        self.send({"extend": seconds, "stage": stage})


def serve(make: Callable[[Channel], Handler]) -> None:
    """Answer requests until standard input ends.

    Parameters
    ----------
    make : callable
        Returns the function that carries out a request; called once. An answer with ``"fatal"`` is
        the last one: the process is not fit for another.
    """
    # Libraries and compilers write to file 1; answers go where they cannot.
    channel = Channel(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    handle = make(channel)
    channel.send({"answer": {"verdict": "ready"}})
    for line in sys.stdin:
        message = json.loads(line)
        _alarm(message["limit"])
        try:
            answer = handle(message["request"])
        except Exception as err:  # noqa: BLE001 - one candidate must never cost the others
            line = (str(err).strip().splitlines() or ["no message"])[-1]
            answer = {"verdict": "error", "message": f"{type(err).__name__}: {line}"}
        signal.alarm(0)
        channel.send({"answer": answer})
        if answer.get("fatal"):
            # Without clean-up, which a broken device may block.
            os._exit(0)


def _alarm(seconds: float) -> None:
    """Let the kernel end this process some time after a request: code that hangs looks at nothing."""
    signal.alarm(int(seconds) + _GRACE)
