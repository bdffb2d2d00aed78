"""Child process of the benchmark: one contender, told what to do by JSON lines on standard input.

    python benchmarks/worker.py CONTENDER '{"work": …, "device": …, "cache": …, "options": {…}}'

Each request is ``{"do": "prepare" | "measure" | "release" | "build" | "ceilings", "row": …, "dtype": …}``; each
answer is one line, ``{"ok": …}`` or ``{"error": text, "fatal": bool}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

#: Errors after which a CUDA context is of no use.
_FATAL = ("CUDA error", "CUDA:", "cudaError", "illegal memory", "device-side assert", "CUDA_ERROR")
_MAX_MESSAGE = 400


def make(name: str, settings: dict[str, Any]) -> Any:
    """Make the contender, or the writer of the shared data."""
    from peers import create
    from peers.base import Context

    context = Context(
        Path(settings["work"]), settings["device"], Path(settings["cache"]), settings["options"]
    )
    if name == "reference":
        from peers.reference import Reference

        return Reference(context)
    return create(name, context)


def answer_to(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request."""
    if request["do"] == "ceilings":
        return peer.ceilings()
    method = {"prepare": peer.prepare, "measure": peer.measure, "release": peer.release}
    if request["do"] == "build":  # of this project only
        return peer.library(request["row"], request["dtype"])[1]
    return method[request["do"]](request["row"], request["dtype"])


def failure(error: BaseException) -> dict[str, Any]:
    """An error as an answer; the whole of it goes to the log."""
    traceback.print_exception(error)
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # TVM prints its own stack before the message, PyTorch after it.
    line = lines[-1] if type(error).__module__.startswith("tvm") else lines[0]
    fatal = any(mark in text for mark in _FATAL)
    return {"error": f"{type(error).__name__}: {line}"[:_MAX_MESSAGE], "fatal": fatal}


def main() -> None:
    """Say hello with the versions, then answer until standard input ends."""
    # Frameworks print to the file descriptors: keep a private copy of standard output.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(value: dict[str, Any]) -> None:
        output.write(json.dumps(value) + "\n")
        output.flush()

    try:
        peer = make(sys.argv[1], json.loads(sys.argv[2]))
        send({"ok": peer.versions()})
    except Exception as error:  # noqa: BLE001 - whatever a framework raises, it is missing
        send({**failure(error), "fatal": True})
        return
    for line in sys.stdin:
        try:
            send({"ok": answer_to(peer, json.loads(line))})
        except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
            problem = failure(error)
            send(problem)
            if problem["fatal"]:
                break
    output.flush()
    os._exit(0)  # frameworks' teardown has nothing to add, and sometimes hangs


if __name__ == "__main__":
    main()
