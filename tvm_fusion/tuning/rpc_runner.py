"""Measures candidates on other machines: TVM's own RPC tracker and servers.

Servers are plain TVM (``python -m tvm.exec.rpc_server``), without this package. Each measurement is
in a session of one server, controlled by a child process here, so that neither a server that is
lost nor one that hangs stops the others. A candidate whose server is lost is measured again when
the others are done; only if that one is lost too, it is the candidate that crashes servers.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from tvm import rpc

from ..errors import TuningError
from .measure import RunRequest, RunResult
from .process import Answer, Worker, WorkerPool
from .rpc_worker import WAITING

_MODULE = "tvm_fusion.tuning.rpc_worker"

#: Seconds in which one of the servers is back, if all have gone, and between two questions whether it is.
_BACK_SECONDS, _ASK_AGAIN = 60.0, 1.0

#: Seconds in which a tracker answers.
_CONNECT_SECONDS = 10.0


class RpcRunner:
    """Measures candidates on all servers of a key.

    Parameters
    ----------
    host, port : str, int
        The tracker.
    key : str
        Key of the servers; their devices must be alike.
    timeout_s : float
        Seconds for one candidate, without the wait for a server.
    wait_s : float
        Seconds to wait for a server.
    sessions : int, optional
        Servers to use at once at most; all that the tracker knows when absent.

    Raises
    ------
    TuningError
        If there is no tracker, or it knows no such server.
    """

    in_parts = False  # each time it asks the tracker for sessions

    def __init__(
        self,
        host: str,
        port: int,
        key: str,
        *,
        timeout_s: float = 30.0,
        wait_s: float = 180.0,
        sessions: int | None = None,
    ) -> None:
        self._host, self._port, self._key = host, int(port), key
        self._timeout_s, self._wait_s, self._sessions = timeout_s, wait_s, sessions
        settings = {
            "host": host, "port": self._port, "key": key, "timeout_s": timeout_s, "wait_s": wait_s,
        }  # fmt: skip
        self._settings = json.dumps(settings)
        self._workers: list[Worker] = []
        if not self.servers():
            raise TuningError(
                f"the tracker at {host}:{port} knows no server with the key {key!r}; start one with "
                f"`python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key}`"
            )

    def servers(self) -> int:
        """How many servers of the key the tracker knows now.

        Raises
        ------
        TuningError
            If there is no tracker.
        """
        address = self._host, self._port
        try:
            socket.create_connection(address, _CONNECT_SECONDS).close()
            found: dict[str, Any] = rpc.connect_tracker(*address).summary()
        except (OSError, RuntimeError) as err:
            raise TuningError(
                f"there is no RPC tracker at {self._host}:{self._port} ({err}); start one with "
                f"`python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self._port} --port-end {self._port + 1}`"
            ) from err
        names = (info.get("key") for info in found["server_info"])
        return sum(name == f"server:{self._key}" for name in names)

    def run(self, requests: Sequence[RunRequest]) -> list[RunResult]:
        """Check and time candidates.

        Parameters
        ----------
        requests : sequence of RunRequest
            Those of one kernel together are quickest.

        Returns
        -------
        list of RunResult
            In the order of the requests. ``"lost"`` are those for which no server is left.

        Raises
        ------
        TuningError
            If a worker cannot be started, or the tracker is gone.
        """
        asked = [request.to_dict() for request in requests]
        answers = self._ask(asked)
        again = [index for index, answer in enumerate(answers) if _server_lost(answer)]
        if again:
            retried = self._ask([asked[index] for index in again])
            for index, answer in zip(again, retried, strict=True):
                if _server_lost(answer):
                    why = answer["message"]
                    answer = {"verdict": "crashed", "message": f"two servers were lost: {why}"}
                answers[index] = answer
        return [RunResult.from_dict(_without_fault(answer)) for answer in answers]

    def _ask(self, asked: list[dict[str, Any]]) -> list[Answer]:
        count = min(self._sessions or len(asked), len(asked), self._servers_at_last())
        if not count:
            message = f"no server with the key {self._key!r} is left"
            return [{"verdict": "lost", "stage": WAITING, "message": message} for _ in asked]
        while len(self._workers) < count:
            self._workers.append(Worker(_MODULE, [self._settings]))
        pool = WorkerPool(self._workers[:count])
        return pool.map(asked, self._timeout_s, finish={"release": True})

    def _servers_at_last(self) -> int:
        """How many servers there are; where all are gone, they may be starting again."""
        end = time.monotonic() + min(_BACK_SECONDS, self._wait_s)
        while not (count := self.servers()) and time.monotonic() < end:
            time.sleep(_ASK_AGAIN)
        return count

    def close(self) -> None:
        """End the processes, and with them their sessions."""
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> RpcRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _server_lost(answer: Answer) -> bool:
    """Whether a server went away with a candidate in hand, or TVM's client failed over that."""
    return answer["verdict"] in ("lost", "crashed") and answer.get("stage", "") != WAITING


def _without_fault(answer: Answer) -> Answer:
    """A candidate that waited for a server in vain is lost, whatever ended the wait."""
    if answer.get("stage") == WAITING:
        return {
            **answer,
            "verdict": "lost",
            "message": f"no server was to be had: {answer['message']}",
        }
    return answer
