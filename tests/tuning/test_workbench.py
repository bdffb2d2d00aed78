"""Which devices measure, and processes that serve one model after another."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax, s_tir
from tvm_fusion.errors import TuningError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeRunner, FakeWorkbench
from tvm_fusion.tuning import tune as tune_module
from tvm_fusion.tuning import workbench as workbench_module
from tvm_fusion.tuning.local_runner import LocalRunner
from tvm_fusion.tuning.tune import tune_model
from tvm_fusion.tuning.work_dir import WorkDir
from tvm_fusion.tuning.workbench import Remote, Workbench, check_devices

LLVM = parse_target("llvm")


@pytest.fixture
def gpus(monkeypatch):
    """A machine with three GPUs, two of them alike."""
    kinds = {0: "GPU A with 100 multiprocessors", 1: "GPU A with 100 multiprocessors"}
    kinds[2] = "GPU A with 80 multiprocessors"
    monkeypatch.setattr(workbench_module, "_kind_of", lambda number: kinds.get(number, ""))


def test_gpus_that_are_alike_measure_together(gpus):
    assert check_devices("cuda", None, None) == (0,)
    assert check_devices("cuda", None, [1]) == (1,)
    assert check_devices("cuda", None, (1, 0)) == (1, 0)


def test_gpus_that_are_not_alike_are_refused(gpus):
    with pytest.raises(
        TuningError, match=r"must be alike: 0 is GPU A with 100 .* 2 is GPU A with 80"
    ):
        check_devices("cuda", None, [0, 2])
    with pytest.raises(TuningError, match="this machine has no GPU 3"):
        check_devices("cuda", None, [0, 3])


@pytest.mark.parametrize("devices", [[], [0, 0], [-1]])
def test_numbers_that_name_no_devices(gpus, devices):
    with pytest.raises(ValueError, match="different numbers of GPUs"):
        check_devices("cuda", None, devices)


def test_devices_go_with_gpus_of_this_machine(tmp_path):
    with pytest.raises(ValueError, match="do not go with target llvm"):
        tune_model(product(), LLVM, tmp_path, devices=[0])
    with pytest.raises(ValueError, match="do not go with servers of a tracker"):
        check_devices("cuda", Remote("h", 1, "k"), [0])
    assert not list(tmp_path.iterdir())


def test_each_device_has_a_process_of_its_own():
    runner = LocalRunner("cuda", (0, 1, 3))
    assert [w._command[-1] for w in runner._pool.workers] == ["0", "1", "3"]


def product(rows=8):
    """relu(x · w)."""
    b = ModuleBuilder()
    y = b.op("product", relax.op.matmul(b.input("x", (rows, 16)), b.const(16, 16)))
    return b.finish(b.relu("relu", y))


def test_one_workbench_serves_several_models(tmp_path):
    with Workbench(LLVM) as bench:
        pids = [worker.pid for worker in bench.builder._pool.workers]
        assert None not in pids  # launched, before anyone asks
        for rows in (8, 24):
            found = tune_model(
                product(rows), LLVM, tmp_path, trials=6, name=f"rows {rows}", workbench=bench
            )
            assert found.trials >= 3 and found.whole is not None
        assert [worker.pid for worker in bench.builder._pool.workers] == pids
    assert all(worker.pid is None for worker in bench.builder._pool.workers)


def test_meta_schedule_reads_what_tuning_found(tmp_path):
    """TVM's own reader opens the database, and a record's trace fits its workload."""
    for _ in range(2):  # the second run finds nothing new
        bench = FakeWorkbench(FakeBuilder(), FakeRunner(lambda *_: 2.0))
        tune_model(product(), LLVM, tmp_path, trials=6, workbench=bench)
        (place,) = WorkDir(tmp_path).places()
        database = s_tir.meta_schedule.database.JSONDatabase(work_dir=str(place.folder))
        (record,) = database.get_all_tuning_records()
        assert [float(s) for s in record.run_secs] == pytest.approx([2e-6] * 3, rel=0.01)
        schedule = s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        notes = schedule.get(schedule.get_sblock("root")).annotations
        (trial,) = {t.template for t in place.records()} & {str(notes["tvm_fusion.template"])}
        assert trial


def test_a_workbench_of_another_kind_is_refused(tmp_path):
    bench = FakeWorkbench(FakeBuilder(), FakeRunner(lambda *_: 1.0))
    with pytest.raises(ValueError, match="for llvm, the target is cuda"):
        tune_model(product(), parse_target("cuda:sm_90"), tmp_path, workbench=bench)
    with pytest.raises(ValueError, match="leave remote and devices out"):
        tune_model(product(), LLVM, tmp_path, workbench=bench, devices=[0])


def test_nothing_is_left_where_a_workbench_cannot_be_made(monkeypatch):
    closed = []
    monkeypatch.setattr(LocalRunner, "close", lambda self: closed.append(self))
    monkeypatch.setattr(workbench_module, "References", lambda count: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Workbench(LLVM)
    assert len(closed) == 1 and tune_module.Workbench is Workbench
