"""TVM's tracker and two servers on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.build.library import export_library
from tvm_fusion.cli import main
from tvm_fusion.compat import tirx, tvm
from tvm_fusion.errors import TuningError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.tuning.build_worker import load_function
from tvm_fusion.tuning.measure import BuildRequest, Built, RunRequest
from tvm_fusion.tuning.rpc_runner import RpcRunner
from tvm_fusion.tuning.rpc_worker import MEASURING, WAITING
from tvm_fusion.tuning.work_dir import WorkDir

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


def answers(port: int) -> bool:
    """Whether somebody listens on a port."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


class Cluster:
    """A tracker and servers, each in a process group of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.tracker = self._start(
            "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", self.port,
            "--port-end", self.port + 1,
        )  # fmt: skip
        self.servers: list[subprocess.Popen] = []
        wait_until(lambda: answers(self.port))

    @staticmethod
    def _start(module: str, *arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ensure(self, count: int) -> None:
        """Start servers until the tracker knows so many."""
        for _ in range(count - self.known()):
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
                )
            )
        wait_until(lambda: self.known() >= count)

    def known(self) -> int:
        """Servers that the tracker knows."""
        with contextlib.suppress(TuningError):
            return RpcRunner("127.0.0.1", self.port, KEY).servers()
        return 0

    def close(self) -> None:
        """End everything."""
        for process in (*self.servers, self.tracker):
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kill a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def cluster():
    """A tracker with two servers."""
    cluster = Cluster()
    try:
        cluster.ensure(2)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def candidate(kernels, references, tmp_path):
    """Makes a candidate of the dense kernel that runs a shell command first."""
    source = kernels.dense()
    (inputs,) = references.make([source])

    def make(name: str, command: str) -> RunRequest:
        func = load_function(source.func_json)
        call = tirx.call_extern("int32", "system", command)
        func = func.with_body(tirx.SeqStmt([tirx.Evaluate(call), func.body]))
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        path = tmp_path / f"{name}.so"
        export_library(tvm.compile(mod, target="llvm"), path)
        return RunRequest(Built(path, name), inputs, "llvm")

    return make


def requests_of(source, builder, references, count: int) -> list[RunRequest]:
    """Good candidates of a kernel."""
    (inputs,) = references.make([source])
    space = spaces(load_function(source.func_json), parse_target("llvm"))[0]
    options = space.points[0].options[:count]
    built = builder.build([BuildRequest(source, space.template, d) for d in options])
    assert all(isinstance(b, Built) for b in built)
    return [RunRequest(b, inputs, "llvm") for b in built]


def test_no_tracker_and_no_server_are_said(cluster):
    port = free_port()
    with pytest.raises(TuningError, match="no RPC tracker at 127") as caught:
        RpcRunner("127.0.0.1", port, KEY)
    # What is said to be done helps: TVM's tracker ends where its last port is not above the first one.
    command = shlex.split(str(caught.value).split("`")[1].replace("0.0.0.0", "127.0.0.1"))
    with subprocess.Popen([sys.executable, *command[1:]], start_new_session=True) as tracker:
        try:
            with pytest.raises(TuningError, match="no server with the key"):
                wait_until(lambda: answers(port))
                RpcRunner("127.0.0.1", port, KEY)
        finally:
            os.killpg(tracker.pid, signal.SIGKILL)
    with pytest.raises(TuningError, match="no server with the key 'h200'; start one with"):
        RpcRunner("127.0.0.1", cluster.port, "h200")


def test_the_command_tunes_on_servers(cluster, tmp_path, capsys):
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    model, work = tmp_path / "tiny.json", tmp_path / "work"
    model.write_text(tvm.ir.save_json(b.finish(b.relu("second", b.relu("first", x)))))
    remote = ["--rpc", f"127.0.0.1:{cluster.port}", "--key", KEY]
    command = ["tune", str(model), "--work-dir", str(work), *remote]
    page = tmp_path / "tuning.html"
    assert main([*command, "--trials", "3", "--html", str(page)]) == 0
    captured = capsys.readouterr()
    assert "tiny: tuned:" in captured.out and "whole model" not in captured.out
    records = WorkDir(work).places()[0].records()
    assert {t.device for t in records} == {f"rpc:{KEY}"} and all(t.verdict == "ok" for t in records)
    assert "only servers measured" in page.read_text()
    # Later neither servers nor a tracker are needed, and another key has other devices.
    cached = [*command[:-4], "--require-cached", "--rpc", "localhost:1", "--key"]
    assert main([*cached, KEY]) == 0
    assert main([*cached, "other"]) == 2
    assert "never measured" in capsys.readouterr().err
    assert main(["compile", str(model), "--work-dir", str(work), "-o", str(tmp_path / "x.so")]) == 0


def test_a_server_that_dies_and_bad_candidates(
    kernels, builder, references, cluster, candidate, tmp_path
):
    """What is in hand when a server dies is measured on the other one."""
    cluster.ensure(2)
    before = cluster.known()
    good = requests_of(kernels.dense(), builder, references, 6)
    inputs = good[0].inputs
    once = tmp_path / "died"
    dies = candidate("dies", f"[ -e {once} ] || {{ touch {once}; kill -9 $PPID; }}")
    hangs = candidate("hangs", "sleep 3600")
    wrong = RunRequest(
        good[0].built, dataclasses.replace(inputs, seed=1, tolerances=(1e-9,)), "llvm"
    )
    requests = [*good[:3], dies, wrong, *good[3:]]
    with RpcRunner("127.0.0.1", cluster.port, KEY, timeout_s=8) as runner:
        results = runner.run(requests)
        (late,) = runner.run([hangs])
    assert once.exists()
    assert [r.verdict for r in results] == ["ok"] * 4 + ["wrong"] + ["ok"] * 3
    for result in results:
        assert bool(result.samples_us) == (result.verdict == "ok")
        assert all(sample > 0 for sample in result.samples_us)
    assert (late.verdict, late.message) == ("timeout", "took more than 8 s")
    # A server of TVM 0.27 goes with a session that crashes.
    wait_until(lambda: cluster.known() == before - 1)


def test_without_servers_candidates_are_lost_not_failed(kernels, builder, references, cluster):
    cluster.ensure(1)
    requests = requests_of(kernels.dense(), builder, references, 2)
    with RpcRunner("127.0.0.1", cluster.port, KEY, wait_s=5) as runner:
        for server in cluster.servers:
            end(server)
        wait_until(lambda: runner.servers() == 0)
        results = runner.run(requests)
    assert [r.verdict for r in results] == ["lost"] * 2
    assert "no server" in results[0].message and not results[0].samples_us


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ({"verdict": "lost", "stage": MEASURING}, {"verdict": "ok"}, "ok"),
        # TVM's client may end the process when its server goes.
        ({"verdict": "crashed", "stage": MEASURING}, {"verdict": "ok"}, "ok"),
        ({"verdict": "lost", "stage": MEASURING}, {"verdict": "wrong"}, "wrong"),
        (
            {"verdict": "lost", "stage": MEASURING},
            {"verdict": "lost", "stage": MEASURING},
            "crashed",
        ),
        ({"verdict": "lost", "stage": MEASURING}, {"verdict": "lost", "stage": WAITING}, "lost"),
        ({"verdict": "timeout", "stage": WAITING}, None, "lost"),
        ({"verdict": "timeout", "stage": MEASURING}, None, "timeout"),
        ({"verdict": "error"}, None, "error"),
    ],
)
def test_what_a_lost_server_means(monkeypatch, first, second, verdict):
    monkeypatch.setattr(RpcRunner, "servers", lambda self: 2)
    runner = RpcRunner("127.0.0.1", 1, KEY)
    rounds = [[first, {"verdict": "ok"}], [second]]
    asked = []

    def ask(requests):
        asked.append(len(requests))
        return [{"message": "so it was", **answer} for answer in rounds[len(asked) - 1]]

    monkeypatch.setattr(runner, "_ask", ask)
    request = types.SimpleNamespace(to_dict=dict)
    results = runner.run([request, request])
    assert [r.verdict for r in results] == [verdict, "ok"]
    assert asked == [2] + [1] * (second is not None)
