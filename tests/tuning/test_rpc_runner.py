"""TVM's tracker and two servers on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.compat import tirx
from tvm_fusion.errors import TuningError
from tvm_fusion.targets import parse_target
from tvm_fusion.tuning.build_worker import load_function
from tvm_fusion.tuning.measure import BuildRequest, Built, RunRequest
from tvm_fusion.tuning.rpc_runner import RpcRunner

pytest.importorskip("tornado")  # TVM's tracker needs it

KEY = "box"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    """Ask until the answer is yes."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


class Cluster:
    """A tracker and servers, each in a process group of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.tracker = self._start(
            "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", self.port,
            "--port-end", self.port + 1,
        )  # fmt: skip
        self.servers: list[subprocess.Popen] = []
        wait_until(self._tracker_answers)

    def _tracker_answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    @staticmethod
    def _start(module: str, *arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, count: int, runner: RpcRunner | None = None) -> None:
        """Start servers and wait until the tracker knows them."""
        for _ in range(count):
            port = free_port()
            self.servers.append(
                self._start(
                    "tvm.exec.rpc_server",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    port,
                    "--port-end",
                    port + 1,
                    "--tracker",
                    f"127.0.0.1:{self.port}",
                    "--key",
                    KEY,
                )  # fmt: skip
            )
        wait_until(lambda: self.known() == len(self.servers))

    def known(self) -> int:
        """Servers that the tracker knows."""
        with contextlib.suppress(TuningError):
            return RpcRunner("127.0.0.1", self.port, KEY).servers()
        return 0

    def kill(self, number: int) -> None:
        """End a server, its sessions included."""
        end(self.servers.pop(number))

    def close(self) -> None:
        """End everything."""
        for process in (*self.servers, self.tracker):
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kill a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster():
    """A tracker with two servers."""
    cluster = Cluster()
    try:
        cluster.add(2)
        yield cluster
    finally:
        cluster.close()


def test_no_tracker_and_no_server_are_said(cluster):
    with pytest.raises(TuningError, match="no RPC tracker at 127.0.0.1:"):
        RpcRunner("127.0.0.1", free_port(), KEY)
    with pytest.raises(TuningError, match="no server with the key 'h200'; start one with"):
        RpcRunner("127.0.0.1", cluster.port, "h200")


def test_bad_candidates_and_a_server_that_is_killed(
    kernels, builder, references, cluster, tmp_path
):
    """What is in hand when a server dies is measured on the other one."""
    source = kernels.dense()
    (inputs,) = references.make([source])
    space = spaces(load_function(source.func_json), parse_target("llvm"))[0]
    built = builder.build(
        [BuildRequest(source, space.template, d) for d in space.points[0].options[:12]]
    )
    assert all(isinstance(b, Built) for b in built)
    requests = [RunRequest(b, inputs, "llvm") for b in built]
    wrong = Built(export(kernels, tmp_path / "wrong.so", lambda body: tirx.Evaluate(0)), "wrong")
    pause = tirx.Evaluate(tirx.call_extern("int32", "pause"))
    hangs = Built(export(kernels, tmp_path / "hangs.so", lambda body: pause), "hangs")
    with RpcRunner("127.0.0.1", cluster.port, KEY, timeout_s=10) as runner:
        results = runner.run([requests[0], RunRequest(wrong, inputs, "llvm"), *requests[1:3]])
        assert [r.verdict for r in results] == ["ok", "wrong", "ok", "ok"]
        assert len(results[0].samples_us) >= 3 and min(results[0].samples_us) > 0

        # Enough work for the kill to fall into it, whatever the machine's speed.
        killed = threading.Thread(target=lambda: (time.sleep(1.5), cluster.kill(0)))
        killed.start()
        results = []
        while killed.is_alive() or not results:
            results += runner.run(requests)
        killed.join()
        assert [r.verdict for r in results] == ["ok"] * len(results)
        assert cluster.known() == 1

        (late,) = runner.run([RunRequest(hangs, inputs, "llvm")])
        assert (late.verdict, late.message) == ("timeout", "took more than 10 s")


def test_without_servers_candidates_are_lost_not_failed(kernels, builder, references, cluster):
    source = kernels.dense()
    (inputs,), (built,) = references.make([source]), builder.build([BuildRequest(source)])
    request = RunRequest(built, inputs, "llvm")
    with RpcRunner("127.0.0.1", cluster.port, KEY, wait_s=2) as runner:
        assert runner.run([request])[0].verdict == "ok"
        while cluster.servers:
            cluster.kill(0)
        wait_until(lambda: runner.servers() == 0)
        results = runner.run([request] * 2)
        assert [r.verdict for r in results] == ["lost"] * 2
        assert "no server" in results[0].message and not results[0].samples_us


def export(kernels, path, change):
    """A library of the dense kernel with another body."""
    from tvm_fusion.build.library import export_library
    from tvm_fusion.compat import tvm

    func = load_function(kernels.dense().func_json)
    changed = func.with_body(change(func.body)).with_attr("global_symbol", "main")
    export_library(tvm.compile(tvm.IRModule({"main": changed}), target="llvm"), path)
    return path
