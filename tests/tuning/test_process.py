"""Worker processes: answers in order, and what is lost when one dies."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tvm_fusion.errors import TuningError
from tvm_fusion.tuning.process import Worker, WorkerDied, WorkerPool

TOY = """
import os, signal, subprocess, sys, time
from tvm_fusion.tuning.serve import serve

def make(channel):
    def handle(request):
        do = request["do"]
        if do == "hang":
            time.sleep(3600)
        if do == "compile":  # a child that would go on for long
            with open(request["file"], "w") as file:
                print(subprocess.Popen(["sleep", "3600"]).pid, file=file)
            channel.extend(0.5, "compiling")
            time.sleep(3600)
        if do == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if do == "exit":
            print("out of luck", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if do == "raise":
            raise KeyError("missing")
        if do == "slow":
            channel.extend(60, "second half")
            time.sleep(float(request["seconds"]))
        if do == "wait":
            channel.extend(0.5, "waiting")
            time.sleep(3600)
        print("noise on standard output")
        os.system("echo noise of a child")
        return {"verdict": "done", "pid": os.getpid(), "number": request.get("number"),
                "fatal": do == "last"}
    return handle

while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):  # what it imports takes long
    time.sleep(0.01)
serve(make)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes workers of the module above."""
    (tmp_path / "toy_worker.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = []

    def make(*arguments: str) -> Worker:
        made.append(Worker("toy_worker", arguments))
        return made[-1]

    yield make
    for worker in made:
        worker.kill()


def test_a_worker_lives_on(toy):
    worker = toy()
    first = worker.ask({"do": "work", "number": 1}, 30)
    assert (first["verdict"], first["number"]) == ("done", 1)
    assert worker.ask({"do": "work"}, 30)["pid"] == first["pid"] == worker.pid


def test_an_unforeseen_error_costs_only_the_request(toy):
    worker = toy()
    pid = worker.ask({"do": "work"}, 30)["pid"]
    assert worker.ask({"do": "raise"}, 30) == {"verdict": "error", "message": "KeyError: 'missing'"}
    assert worker.ask({"do": "work"}, 30)["pid"] == pid


@pytest.mark.parametrize(
    ("do", "limit", "verdict", "message"),
    [
        ("crash", 30, "crashed", "died of SIGSEGV"),
        ("exit", 30, "crashed", "ended with exit code 3 (out of luck)"),
        ("hang", 0.5, "timeout", "took more than 0.5 s"),
    ],
)
def test_a_worker_that_dies_is_replaced(toy, do, limit, verdict, message):
    worker = toy()
    pid = worker.ask({"do": "work"}, 30)["pid"]
    with pytest.raises(WorkerDied) as info:
        worker.ask({"do": do}, limit)
    assert (info.value.verdict, str(info.value)) == (verdict, message)
    again = worker.ask({"do": "work"}, 30)
    assert again["verdict"] == "done" and again["pid"] != pid


def test_a_last_answer_replaces_the_worker(toy):
    worker = toy()
    last = worker.ask({"do": "last"}, 30)
    assert last["verdict"] == "done"
    assert worker.ask({"do": "work"}, 30)["pid"] != last["pid"]


def test_a_stage_has_a_time_of_its_own(toy):
    worker = toy()
    worker.start()
    # Before the stage begins there are 3 s, which a busy machine may need.
    assert worker.ask({"do": "slow", "seconds": 3.5}, 3.0)["verdict"] == "done"
    with pytest.raises(WorkerDied) as info:
        worker.ask({"do": "wait"}, 30)
    assert (info.value.verdict, info.value.stage) == ("timeout", "waiting")


def test_what_a_worker_started_ends_with_it(toy, tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(WorkerDied):
        toy().ask({"do": "compile", "file": str(file)}, 60)
    pid = int(file.read_text())
    for _ in range(600):
        try:
            # A child that nobody waits for is a zombie until init has seen it.
            if open(f"/proc/{pid}/stat").read().split()[2] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def test_a_worker_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(TuningError, match=r"cannot start: ended with exit code 1 .*no_such_module"):
        Worker("no_such_module").ask({}, 5)


def test_a_pool_keeps_the_order_and_loses_one_request_per_death(toy):
    pool = WorkerPool([toy(), toy()])
    what = ["work", "crash", "work", "hang", "work", "work", "raise", "work"]
    answers = pool.map([{"do": do, "number": i} for i, do in enumerate(what)], 5)
    wanted = {"work": "done", "crash": "crashed", "hang": "timeout", "raise": "error"}
    assert [a["verdict"] for a in answers] == [wanted[do] for do in what]
    assert [a["number"] for a in answers if a["verdict"] == "done"] == [0, 2, 4, 5, 7]
    assert pool.map([], 1) == []


def test_a_pool_holds_what_is_around_a_request(toy):
    held = threading.Lock()
    pool = WorkerPool([toy(), toy()], lambda number: held)
    begin = time.monotonic()
    for worker in pool.workers:
        worker.start()
    answers = pool.map([{"do": "hang"}] * 3, 0.4)
    assert [a["verdict"] for a in answers] == ["timeout"] * 3
    assert time.monotonic() - begin > 1.1  # one after another: 3 x 0.4 s, not 2 x 0.4 s


def test_a_pool_says_when_a_worker_has_nothing_left(toy):
    pool = WorkerPool([toy()])
    pool.map([{"do": "work"}], 30, finish={"do": "last"})
    assert pool.workers[0].pid is None


def test_ctrl_c_ends_the_workers(toy):
    pool = WorkerPool([toy(), toy()])
    for worker in pool.workers:
        worker.start()
    pids = [worker.pid for worker in pool.workers]
    # Tests may run as a background job, which ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.map([{"do": "hang"}] * 8, 60)
    finally:
        signal.signal(signal.SIGINT, before)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_are_launched_before_they_are_asked(toy, tmp_path):
    """Without waiting for them: these are not ready before there is a file, which is made later."""
    go = tmp_path / "go"
    pool = WorkerPool([toy(str(go)), toy(str(go))])
    pool.launch()
    go.touch()
    pids = {worker.pid for worker in pool.workers}
    assert None not in pids and len(pids) == 2
    pool.launch()  # once
    answers = pool.map([{"do": "work"}] * 4, 30)
    assert {answer["pid"] for answer in answers} <= pids == {w.pid for w in pool.workers}


def test_what_is_submitted_is_done_in_order_and_a_death_costs_one(toy):
    pool = WorkerPool([toy()])
    what = ["work", "crash", "work", "raise"]
    asked = [pool.submit({"do": do, "number": i}, 30, dict) for i, do in enumerate(what)]
    answers = [future.result() for future in asked]
    assert [a["verdict"] for a in answers] == ["done", "crashed", "done", "error"]
    assert [a.get("number") for a in answers][::2] == [0, 2]
    assert pool.submit({"do": "work"}, 30, lambda answer: answer["pid"]).result() > 0
    pool.close()


def test_closing_a_pool_ends_what_was_submitted(toy):
    pool = WorkerPool([toy(), toy()])
    asked = [pool.submit({"do": "hang"}, 600, dict) for _ in range(5)]
    time.sleep(0.5)
    pool.close()
    assert all(future.done() for future in asked) and asked[-1].cancelled()
    assert all(worker.pid is None for worker in pool.workers)


def test_workers_import_no_pytorch(tmp_path, monkeypatch):
    """TVM would; what asks for it finds none."""
    text = """
import sys
import tvm
from tvm_fusion.tuning.serve import serve
found = sorted(name for name in sys.modules if name.split(".")[0] == "torch")
serve(lambda channel: lambda request: {"verdict": "done", "found": found})
"""
    (tmp_path / "looks_worker.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    worker = Worker("looks_worker")
    assert worker.ask({}, 60)["found"] == ["torch"]  # None, which stands for it
    worker.kill()
