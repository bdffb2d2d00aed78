"""Meta-schedule's own files: read by TVM, shared by processes, never fatal."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.compat import Target, s_tir, te, tvm
from tvm_fusion.errors import DatabaseError
from tvm_fusion.tuning import meta_database
from tvm_fusion.tuning.meta_database import MetaDatabase

ms = s_tir.meta_schedule

CUDA = {arch: Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90", "sm_90a")}


def module(size: int = 64, factor: float = 2.0) -> tvm.IRModule:
    """A product with a constant."""
    data = te.placeholder((size, size), "float32", name="data")
    out = te.compute((size, size), lambda i, j: data[i, j] * factor, name="out")
    return tvm.IRModule({"main": te.create_prim_func([data, out])})


def trace(mod: tvm.IRModule, choice: int = 0):
    """A trace with every form of instruction that spaces of this package and of TVM have."""
    schedule = s_tir.Schedule(mod)
    block = schedule.get_sblock("out")
    i, j = schedule.get_loops(block)
    tiles = schedule.sample_perfect_tile(i, n=2, decision=[int(schedule.get(i).extent) // 4, 4])
    rows, inner = schedule.split(i, tiles)
    columns, lanes = schedule.split(j, [None, 8])
    schedule.reorder(rows, columns, inner, lanes)
    picked = schedule.sample_categorical([1, 2, 4], [0.25, 0.25, 0.5], decision=choice)
    schedule.annotate(block, "tvm_fusion.rows", picked)
    schedule.annotate(block, "tvm_fusion.template", "elementwise")
    return schedule.trace


def choices(records) -> list[tuple[int, list[float]]]:
    """What the last sample of each record is, and its times."""
    traces = [json.loads(json.dumps(record.as_json()))[0] for record in records]
    times = [list(map(float, record.run_secs)) for record in records]
    return [(decisions[-1][1], own) for (_, decisions), own in zip(traces, times, strict=True)]


@pytest.fixture
def filled(tmp_path: Path) -> MetaDatabase:
    database = MetaDatabase(tmp_path, "sm_90")
    for mod in (module(), module(32)):
        for choice, seconds in ((0, [3e-6, 1e-6]), (1, [1e-6]), (2, [4e-6])):
            database.commit(mod, trace(mod, choice), seconds, CUDA["sm_90a"])
    return database


def test_commit_and_look_up(filled: MetaDatabase, tmp_path: Path) -> None:
    for database in (filled, MetaDatabase(tmp_path, "sm_90")):
        records = database.records(module())
        assert choices(records) == [(1, [1e-6]), (0, [3e-6, 1e-6]), (2, [4e-6])]
        assert len(database.records(module(), most=2)) == 2
        assert choices([database.best(module())]) == [(1, [1e-6])]
        assert database.records(module(factor=3.0)) == []
        assert database.best(module(128)) is None


def test_records_schedule_as_they_were_measured(filled: MetaDatabase) -> None:
    mod = module()
    wanted, found = s_tir.Schedule(mod), s_tir.Schedule(mod)
    trace(mod, 1).apply_to_schedule(wanted, remove_postproc=False)
    filled.best(mod).trace.apply_to_schedule(found, remove_postproc=False)
    tvm.ir.assert_structural_equal(found.mod, wanted.mod)
    view = filled.view([mod, module(128)])
    assert len(view) == 3
    looked_up = view.query_schedule(mod, CUDA["sm_90a"], "main")
    tvm.ir.assert_structural_equal(looked_up.mod, wanted.mod)


def test_tvm_reads_the_files(filled: MetaDatabase, tmp_path: Path) -> None:
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert len(database) == 6
    for mod in (module(), module(32)):
        record = database.query_tuning_record(mod, CUDA["sm_90a"], "main")
        assert choices([record]) == [(1, [1e-6])]


def test_files_of_tvm_are_read(tmp_path: Path) -> None:
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    for mod in (module(), module(32)):
        workload = database.commit_workload(mod)
        arguments = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
        database.commit_tuning_record(
            ms.database.TuningRecord(trace(mod, 2), workload, [2e-6], CUDA["sm_90"], arguments)
        )
    own = MetaDatabase(tmp_path, "sm_90")
    assert choices(own.records(module(32))) == [(2, [2e-6])]
    own.commit(module(32), trace(module(32), 1), [1e-6], CUDA["sm_90"])
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 3
    assert len((tmp_path / "database_workload.json").read_text().splitlines()) == 2


def test_records_of_another_arch_are_ignored(tmp_path: Path) -> None:
    mod = module()
    MetaDatabase(tmp_path, "sm_80").commit(mod, trace(mod), [1e-6], CUDA["sm_80"])
    # TVM takes it.
    theirs = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert theirs.query_tuning_record(mod, CUDA["sm_90"], "main") is not None
    own = MetaDatabase(tmp_path, "sm_90")
    assert own.best(mod) is None and len(own.view([mod])) == 0
    with pytest.raises(ValueError, match="a record of sm_80 among records of sm_90"):
        own.commit(mod, trace(mod), [1e-6], CUDA["sm_80"])
    own.commit(mod, trace(mod, 2), [9e-6], CUDA["sm_90"])
    assert choices(own.records(mod)) == [(2, [9e-6])]


@pytest.mark.parametrize("seconds", [[], [0.0], [float("inf")], [float("nan")], [-1.0]])
def test_times_that_are_none(tmp_path: Path, seconds: list[float]) -> None:
    database = MetaDatabase(tmp_path, "sm_90")
    with pytest.raises(ValueError, match="positive seconds"):
        database.commit(module(), trace(module()), seconds, CUDA["sm_90"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["database_workload.json", "database_tuning_record.json"])
@pytest.mark.parametrize("bad", ["", "garbage", "null", "[0]", '[0,"x"]', "[7,[]]", "\x00\x00"])
def test_a_bad_line_costs_itself_only(filled, tmp_path: Path, name: str, bad: str) -> None:
    """TVM's own reader fails on each, and crashes on the empty one."""
    file = tmp_path / name
    lines = file.read_text().splitlines()
    lines[1] = bad
    file.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match=f"{name}: line skipped: 1 damaged") as caught:
        database = MetaDatabase(tmp_path, "sm_90")
        database.refresh()
    assert len(caught) == 1
    workload = name == "database_workload.json"
    assert choices(database.records(module()))[0][0] == (1 if workload else 0)
    assert len(database.records(module(32))) == (0 if workload else 3)
    # A workload that is lost is written again, under a number of its own.
    database.commit(module(32), trace(module(32), 2), [1e-9], CUDA["sm_90"])
    assert choices([database.best(module(32))]) == [(2, [1e-9])]


def test_killed_while_appending(filled, tmp_path: Path) -> None:
    file = tmp_path / "database_tuning_record.json"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.warns(UserWarning, match="line skipped: 1 damaged"):
        database = MetaDatabase(tmp_path, "sm_90")
    assert len(database.records(module(32))) == 2
    database.commit(module(32), trace(module(32)), [1e-9], CUDA["sm_90"])
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 6


COMMITTER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_meta_database import CUDA, MetaDatabase, module, trace

database = MetaDatabase(Path(sys.argv[1]), "sm_90")
for size in (16, 24, 32, 40)[:: int(sys.argv[2])]:
    for number in range(5):
        seconds = [size * 1e-6 + number * 1e-9 + (int(sys.argv[2]) < 0) * 5e-10]
        database.commit(module(size), trace(module(size)), seconds, CUDA["sm_90"])
"""


def test_two_processes_do_not_mix_their_workloads_up(tmp_path: Path) -> None:
    """They meet the same four workloads in opposite orders."""
    arguments = [sys.executable, "-c", COMMITTER, tmp_path]
    both = [
        subprocess.Popen([*arguments, step, Path(__file__).parent], stderr=subprocess.PIPE)
        for step in ("1", "-1")
    ]
    for process in both:
        _, text = process.communicate()
        assert process.returncode == 0, text.decode()[-2000:]
    theirs = ms.database.JSONDatabase(work_dir=str(tmp_path))
    own = MetaDatabase(tmp_path, "sm_90")
    assert len((tmp_path / "database_workload.json").read_text().splitlines()) == 4
    for size in (16, 24, 32, 40):
        times = [size * 1e-6 + number * 5e-10 for number in range(10)]
        mod = module(size)
        for found in (own.records(mod), theirs.get_top_k(theirs.commit_workload(mod), 100)):
            assert [float(record.run_secs[0]) for record in found] == pytest.approx(times, rel=1e-9)


def test_the_same_record_is_written_once(filled, tmp_path: Path) -> None:
    before = (tmp_path / "database_tuning_record.json").read_bytes()
    database = MetaDatabase(tmp_path, "sm_90")
    for _ in range(2):
        database.commit(module(32), trace(module(32)), [7e-9], CUDA["sm_90"])
    lines = (tmp_path / "database_tuning_record.json").read_bytes().splitlines()
    assert len(lines) == len(before.splitlines()) + 1


def test_a_full_disk(filled, tmp_path: Path, monkeypatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(DatabaseError, match=r"cannot write .*: No space left on device"):
            filled.commit(module(48), trace(module(48)), [1e-6], CUDA["sm_90"])
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 6
    filled.commit(module(48), trace(module(48)), [1e-6], CUDA["sm_90"])
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 7


def test_merge_and_prune(filled, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = MetaDatabase(tmp_path / "other", "sm_90")
    other.commit(module(48), trace(module(48)), [1e-6], CUDA["sm_90"])
    other.commit(module(32), trace(module(32), 1), [1e-6], CUDA["sm_90a"])
    assert filled.merge(other) == 1
    assert filled.merge(other) == filled.merge(filled) == 0
    assert other.merge(filled) == 5
    for size in (32, 48, 64):
        ours, theirs = filled.records(module(size)), other.records(module(size))
        assert choices(ours) == choices(theirs)
    assert filled.prune(2) == (2, 0)
    assert choices(filled.records(module())) == [(1, [1e-6]), (0, [3e-6, 1e-6])]
    assert filled.prune(2) == (0, 0)
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 5


def test_prune_drops_damage(filled, tmp_path: Path) -> None:
    file = tmp_path / "database_tuning_record.json"
    file.write_text("\ngarbage\n" + file.read_text())
    with pytest.warns(UserWarning, match="lines skipped: 2 damaged"):
        assert MetaDatabase(tmp_path, "sm_90").prune(9) == (0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(MetaDatabase(tmp_path, "sm_90").records(module())) == 3


def test_a_trace_of_another_function_is_left_out(tmp_path: Path) -> None:
    database = MetaDatabase(tmp_path, "sm_90")
    database.commit(module(), trace(module()), [1e-6], CUDA["sm_90"])
    file = tmp_path / "database_tuning_record.json"
    file.write_text(file.read_text().replace('"out"', '"no_such_block"'))
    with pytest.warns(UserWarning, match="line skipped"):
        assert MetaDatabase(tmp_path, "sm_90").records(module()) == []


def paths(value, path=()):
    """Where everything in a nest of lists and mappings is."""
    yield path
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for key, part in parts.items() if isinstance(parts, dict) else ():
        yield from paths(part, (*path, key))


def spoilt(row: list, rng: random.Random) -> list:
    """A record with one part replaced, removed or put in."""
    row = copy.deepcopy(row)
    *path, last = rng.choice([path for path in paths(row) if path])
    inside = row
    for key in path:
        inside = inside[key]
    junk = rng.choice([None, True, 0, -1, 10**12, 1.5, "", "x", "b0", [], [[]], {}, {"a": 1}, '"'])
    how = rng.choice(["replace", "replace", "remove", "insert"])
    if how == "replace" or isinstance(inside, dict):
        inside[last] = junk
    elif how == "remove":
        del inside[last]
    else:
        inside.insert(last, junk)
    return row


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_spoilt_records_are_refused_or_raise(seed: int) -> None:
    check_spoilt(seed, count=20)


def check_spoilt(seed: int, count: int) -> None:
    """Nothing that the check lets pass ends the process, whatever TVM thinks of it."""
    rng = random.Random(seed)
    mod = module()
    arguments = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
    workload = ms.database.Workload(mod)
    record = ms.database.TuningRecord(trace(mod), workload, [1e-6], CUDA["sm_90"], arguments)
    row = json.loads(json.dumps(record.as_json()))
    database = MetaDatabase(Path("no such folder"), "sm_90")
    database._workloads = [workload.as_json()]
    for _ in range(count):
        bad = spoilt(row, rng)
        try:
            meta_database._check_record(bad)
        except ValueError:
            continue
        database._rows = [(0, bad)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            database.records(mod)
