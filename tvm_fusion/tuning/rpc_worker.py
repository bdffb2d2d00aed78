"""Worker process that measures candidates on servers of TVM's RPC (see `rpc_runner`)."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm import rpc

from ..build.model import BUILD_ERRORS, last_line
from .clock import evaluate
from .measure import Inputs
from .serve import Channel, Handler, serve
from .values import arguments

#: Seconds for which a session is used. Starting one takes a second or two; a server is lost for about so long, and the
#: time of a candidate, when a kernel hangs on it: TVM's server ends a session only then.
SESSION_SECONDS = 30

#: Stages of a request.
WAITING, MEASURING = "waiting for a server", "measuring"

_ERRORS = (OSError, *BUILD_ERRORS)


class RpcHandler:
    """Carries out requests of `RpcRunner`.

    Parameters
    ----------
    channel : Channel
        Where stages are told.
    settings : mapping
        ``host``, ``port`` and ``key`` of the tracker, ``timeout_s`` for a candidate and ``wait_s``
        for a server.
    """

    def __init__(self, channel: Channel, settings: Mapping[str, Any]) -> None:
        self._channel, self._settings = channel, settings
        self._session: Any = None
        self._opened = 0.0

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Measure one candidate, or give the server back when ``release`` is asked for.

        The answer holds the fields of `RunResult`; its verdict is ``"lost"`` when the connection
        broke or no server was to be had, with the stage.
        """
        if request.get("release"):
            self._close()
            return {"verdict": "released"}
        try:
            self._open()
        except _ERRORS as err:
            return {"verdict": "lost", "stage": WAITING, "message": last_line(err)}
        self._channel.extend(self._settings["timeout_s"], MEASURING)
        try:
            answer = self._measure(request)
        except _ERRORS as err:
            if not self._is_alive():
                self._session = None
                return {"verdict": "lost", "stage": MEASURING, "message": last_line(err)}
            answer = {"verdict": "error", "message": last_line(err)}
        if answer["verdict"] == "error":
            self._close()  # a GPU's context may be of no use any more
        return answer

    def _measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        inputs = Inputs.from_dict(request["inputs"])
        packed = tuple((number, tuple(axes)) for number, axes in request["packed"])
        artifact, session = Path(request["artifact"]), self._session
        session.upload(str(artifact))
        try:
            module = session.load_module(artifact.name)
            device = session.cuda(0) if request["kind"] == "cuda" else session.cpu(0)
            return evaluate(module, device, arguments(inputs, packed), inputs)
        finally:
            with contextlib.suppress(*_ERRORS):
                session.remove(artifact.name)

    def _open(self) -> None:
        """Get a server, unless the one in hand may be used for longer."""
        if self._session is not None and time.monotonic() < self._opened + SESSION_SECONDS:
            return
        self._close()
        settings = self._settings
        self._channel.extend(settings["wait_s"], WAITING)
        tracker = rpc.connect_tracker(settings["host"], settings["port"])
        # Longer than any use of it: the time-outs of candidates are ours.
        limit = SESSION_SECONDS + int(settings["timeout_s"]) + 10
        self._session = tracker.request(settings["key"], session_timeout=limit)
        self._opened = time.monotonic()

    def _is_alive(self) -> bool:
        try:
            self._session.listdir(".")
        except _ERRORS:
            return False
        return True

    def _close(self) -> None:
        self._session = None


def make_handler(channel: Channel) -> Handler:
    """What `serve` calls; the command line is the settings as JSON."""
    return RpcHandler(channel, json.loads(sys.argv[1]))


if __name__ == "__main__":
    serve(make_handler)
