"""Run a step that an untrusted file can crash or hang in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

#: Memory of a child on top of eight times the file. The steps need far less; a damaged file can ask
#: for anything.
MEMORY_BYTES = 8 << 30

_LAUNCH = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "importlib.import_module(sys.argv.pop(1)).main()"
)


class ChildFailure(Exception):
    """The child refused the file, crashed, or ran out of time; the message says which."""


def run(worker: str, request: dict[str, Any], data: bytes, *, step: str, seconds: int) -> bytes:
    """Call ``main`` of the module ``worker`` in a new process and return the body of its answer.

    Parameters
    ----------
    worker : str
        Full module name. Its ``main`` calls ``serve``.
    request, data : dict, bytes
        What the worker's step is given.
    step : str
        Name of the step in messages.
    seconds : int
        Time limit.

    Raises
    ------
    ChildFailure
        If the worker reports an error, dies, or takes too long.
    """
    request = {"memory_bytes": MEMORY_BYTES + 8 * len(data), **request}
    # The parent's sys.path: it may have been changed since the interpreter started.
    command = [sys.executable, "-c", _LAUNCH, json.dumps(sys.path), worker, json.dumps(request)]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChildFailure(f"{step} takes more than {seconds} s") from None
    head, _, body = done.stdout.partition(b"\n")
    if done.returncode != 0 or not head:
        reason = (
            f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        )
        raise ChildFailure(f"{step} crashes on it ({reason})")
    header = json.loads(head)
    if header:
        raise ChildFailure(header["message"].strip() or header["error"])
    return body


def serve(step: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """In the child: run ``step(request, data)`` and answer on stdout with its result or its error."""
    request = json.loads(sys.argv[1])
    _limit_memory(request["memory_bytes"])
    # Native libraries print to the file descriptors: keep a private copy of stdout and close
    # theirs.
    answer = os.fdopen(os.dup(1), "wb")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    header, body = {}, b""
    try:
        body = step(request, sys.stdin.buffer.read())
    except Exception as error:  # noqa: BLE001 - the parent decides what it means
        header = {"error": type(error).__name__, "message": str(error)}
    answer.write(json.dumps(header).encode() + b"\n" + body)
    answer.close()
    os._exit(0)  # native libraries' teardown has nothing to add


def _limit_memory(limit: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
