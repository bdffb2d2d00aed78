"""Tuning of kernels with a compiler and a clock that are not there."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
import zlib
from concurrent.futures import Future

import pytest
from tvm import te
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.errors import DatabaseError, TuningError
from tvm_fusion.targets import parse_target, with_variant
from tvm_fusion.testing.trials import trial
from tvm_fusion.testing.tuning_fakes import (
    FakeBuilder,
    FakeReferences,
    FakeRunner,
    done,
    ok,
    spills,
)
from tvm_fusion.tuning.kernels import kernel_digest
from tvm_fusion.tuning.measure import RunResult
from tvm_fusion.tuning.trials import TrialSet
from tvm_fusion.tuning.tuner import Budget, Device, NewKernel, Tuner
from tvm_fusion.tuning.work_dir import WorkDir

TARGET = with_variant(parse_target("cuda:sm_90"))


def product(rows=256, columns=256, depth=256):
    """A matrix product in float16."""
    x, y = te.placeholder((rows, depth), "float16"), te.placeholder((depth, columns), "float16")
    k = te.reduce_axis((0, depth))
    cast = [lambda i, k: x[i, k].astype("float32"), lambda k, j: y[k, j].astype("float32")]
    z = te.compute((rows, columns), lambda i, j: te.sum(cast[0](i, k) * cast[1](k, j), axis=k))
    return te.create_prim_func([x, y, z])


def time_of(kernel, template, decision):
    """5 µs with tiles of 64 columns, more the farther from that, and half a microsecond of noise."""
    chance = zlib.crc32(repr((template, sorted(decision.items()))).encode()) / 2**32
    away = abs(math.log2(decision.get("tile.columns", 1024) / 64))
    return 5 + 2 * away + chance / 2


def tuner(folder, runner, builder=None, **options):
    """A tuner that keeps its trials in a folder."""
    records = WorkDir(folder).open("sm_90", "float16")
    parts = builder or FakeBuilder(), FakeReferences(), runner
    return Tuner(TARGET, *parts, records, Device("GPU 0", "1.0"), **options)


def test_the_budget_is_kept_and_the_best_is_found(tmp_path):
    runner = FakeRunner(time_of)
    found = tuner(tmp_path, runner)
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    found.run(Budget(64))
    assert found.trials == len(runner.ran) == len(set(runner.ran)) == 64
    assert kernel.best_us < 6 < kernel.default_us
    best = found.best(kernel)
    assert math.isclose(best.microseconds, kernel.best_us)
    assert time_of("", best.template, dict(best.decision)) == best.microseconds


def test_what_was_tried_is_not_tried_again(tmp_path):
    runner = FakeRunner(time_of, stop=30)
    first = tuner(tmp_path, runner)
    first.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
    with pytest.raises(KeyboardInterrupt):
        first.run(Budget(64))
    known = len(WorkDir(tmp_path).open("sm_90", "float16"))
    assert 0 < known <= 30
    at_the_kill = first.kernels.popitem()[1].best_us
    more = FakeRunner(time_of)
    second = tuner(tmp_path, more)
    kernel = second.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    assert kernel.best_us <= at_the_kill and kernel.trials == known
    second.run(Budget(64))
    recorded = {r for r in runner.ran[:known]}
    assert not recorded & set(more.ran)
    assert second.trials == 64 and len(more.ran) == 64 - known
    assert kernel.best_us <= at_the_kill


def hint_for(template, decision, kernel=None):
    """A trial of another device."""
    known = trial(kernel or kernel_digest(product()), 1, 9.0, template=template, device="another")
    return dataclasses.replace(known, decision=decision)


def last_of(func):
    """Template and decision of what is last in a kernel's ranking."""
    space = spaces(func, TARGET)[0]
    return space.template, tuple(e for point in space.points for e in point.options[-1])


@pytest.mark.parametrize("hinted", [True, False])
def test_a_hint_is_tried_after_the_default(tmp_path, hinted):
    builder, runner = FakeBuilder(), FakeRunner(time_of)
    hint = hint_for(*last_of(product()), None if hinted else "other")
    found = tuner(tmp_path, runner, builder, hints=TrialSet([hint]))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    assert kernel.trials == 0 and found.best(kernel) is None  # its time is another device's
    found.measure_first([kernel], Budget(64))
    tried = [t.decision for t in found.records.trials(kernel.digest)]
    default = kernel.search.first()[0].decision
    assert tried == ([default, hint.decision] if hinted else [default])
    found.run(Budget(24))
    assert found.trials == len(set(runner.ran)) == 24


def test_of_a_kernel_with_a_time_nothing_is_measured_first(tmp_path):
    """Neither a hint nor the default: there is a time to plan with, and trials go where they help most."""
    first = tuner(tmp_path, FakeRunner(time_of))
    first.measure_first(first.add([NewKernel(product(), ["matmul"])]), Budget(64))
    runner = FakeRunner(time_of)
    hints = TrialSet([hint_for(*last_of(product()))])
    second = tuner(tmp_path, runner, hints=hints)
    known, new = (second.add([NewKernel(product(rows), ["matmul"])])[0] for rows in (256, 128))
    assert known.opening and new.opening
    second.measure_first([known, new], Budget(64))
    assert known.trials == 1 and new.trials == len(runner.ran) == 1


def test_a_hint_of_which_no_template_knows_is_left_out(tmp_path):
    hint = hint_for("tensor_core", (("no", 1),))
    found = tuner(tmp_path, FakeRunner(time_of), hints=TrialSet([hint]))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    assert kernel.opening == kernel.search.first()
    assert kernel.waiting == kernel.search.first(len(kernel.waiting))


def test_a_hint_that_is_the_default_is_tried_once(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    default = found.add([NewKernel(product(), ["matmul"])])[0].search.first()[0]
    hint = hint_for(default.template, default.decision)
    again = tuner(tmp_path / "b", FakeRunner(time_of), hints=TrialSet([hint]))
    kernel = again.add([NewKernel(product(), ["matmul"])])[0]
    assert kernel.opening == [default] and len(set(kernel.waiting)) == len(kernel.waiting)


def test_trials_of_another_device_are_not_used(tmp_path):
    first = tuner(tmp_path, FakeRunner(time_of))
    first.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
    first.run(Budget(16))
    second = tuner(tmp_path, FakeRunner(time_of))
    second.device = Device("GPU 1", "1.0")
    assert second.add([NewKernel(product(), ["matmul"])])[0].trials == 0


def test_equal_kernels_are_tuned_once(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    one, same, other = found.add([NewKernel(product(n), ["matmul"]) for n in (256, 256, 128)])
    assert one is same is found.add([NewKernel(product(), ["matmul"])])[0]
    assert other is not one


def test_identical_code_is_measured_once(tmp_path):
    class Same(FakeBuilder):
        @staticmethod
        def made(request):
            made = FakeBuilder.made(request)
            return type(made)(made.artifact, "same", 32, 0, 0)

    runner = FakeRunner(time_of)
    found = tuner(tmp_path, runner, Same())
    found.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
    found.run(Budget(20))
    assert len(runner.ran) == 1 and found.trials == 20


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "timeout", "error"])
def test_what_fails_costs_one_trial_and_never_wins(tmp_path, verdict):
    def time(kernel, template, decision):
        found = time_of(kernel, template, decision)
        return RunResult(verdict, (), "why") if found < 6 else ok(found)

    found = tuner(tmp_path, FakeRunner(time))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    found.run(Budget(48))
    assert found.trials == 48 and kernel.best_us >= 6
    failed = [t for t in found.records.trials(kernel.digest) if t.verdict == verdict]
    assert failed and all(t.message == "why" for t in failed)


def test_what_spills_is_not_run(tmp_path):
    def fails(request):
        return spills(request) if dict(request.decision).get("tile.columns") == 32 else None

    runner = FakeRunner(time_of)
    found = tuner(tmp_path, runner, FakeBuilder(fails))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    found.run(Budget(48))
    assert not any('"tile.columns": 32' in ran for ran in runner.ran)
    assert {t.spill_bytes for t in found.records.trials(kernel.digest)} == {0, 8}


def test_trials_go_where_they_pay(tmp_path):
    """One kernel is called ten times, one is near its floor, one is not called."""
    found = tuner(tmp_path, FakeRunner(time_of))
    often, done, never = (
        found.add([NewKernel(product(n), ["matmul"], f)])[0]
        for n, f in ((64, 0), (128, 99), (32, 0))
    )
    often.progress.weight, done.progress.weight = 10, 1
    found.run(Budget(100))
    assert done.trials <= 16 < often.trials and never.trials == 0


def test_work_that_was_lost_is_done_again(tmp_path):
    lost = iter([True] * 5)

    def time(kernel, template, decision):
        return RunResult("lost") if next(lost, False) else time_of(kernel, template, decision)

    found = tuner(tmp_path, FakeRunner(time))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    found.run(Budget(32))
    assert found.trials == len(found.records.trials(kernel.digest)) == 32


def test_a_run_ends_when_nothing_can_be_measured_any_more(tmp_path):
    """Else it would go through all candidates, which may take hours."""
    left = iter([True] * 20)

    def time(kernel, template, decision):
        return time_of(kernel, template, decision) if next(left, False) else RunResult("lost")

    runner = FakeRunner(time)
    found = tuner(tmp_path, runner)
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    with pytest.raises(TuningError, match=r"no server is left .* 20 trials are on record"):
        found.run(Budget(1000))
    assert len(found.records.trials(kernel.digest)) == 20 and len(runner.ran) <= 20 + 3 * 16


def test_a_full_disk_stops_nothing(tmp_path, monkeypatch):
    found = tuner(tmp_path, FakeRunner(time_of))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1

    def full(*_):
        raise DatabaseError("no space left on the device")

    monkeypatch.setattr(found.records._journal, "append", full)
    found.run(Budget(24))
    assert "no space" in found.disk_problem
    assert len(found.records.trials(kernel.digest)) == found.trials == 24
    monkeypatch.undo()
    found.run(Budget(40))
    assert not found.disk_problem
    assert len(WorkDir(tmp_path).open("sm_90", "float16")) == found.trials


def test_the_same_run_twice_is_the_same(tmp_path):
    ran = []
    for name in "ab":
        runner = FakeRunner(time_of)
        found = tuner(tmp_path / name, runner)
        found.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
        found.run(Budget(48))
        ran.append(runner.ran)
    assert ran[0] == ran[1]


def test_what_was_predicted_is_on_record(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    kernel = found.add([NewKernel(product(), ["matmul"])])[0]
    kernel.progress.weight = 1
    found.run(Budget(24))
    for tried in found.records.trials(kernel.digest):
        candidate = kernel.search.candidate_of(tried.template, tried.decision)
        assert tried.predicted_us == candidate.predicted_us > 0


def biased(predicted_us, decision):
    """Times of which the model does not know that wide tiles are slow."""
    return predicted_us * dict(decision).get("tile.columns", 256) ** 0.8


def test_a_refitted_model_tries_better_kernels_first(tmp_path):
    """After five products, the first candidates of a sixth are better than what the template's model ranks first."""
    plain = tuner(tmp_path / "plain", FakeRunner(time_of)).add(
        [NewKernel(product(512, 384), ["matmul"])]
    )[0]
    found = tuner(tmp_path / "refit", FakeRunner(time_of))

    def time(kernel, template, decision):
        search = found.kernels[kernel].search
        candidate = search.candidate_of(template, tuple(decision.items()))
        return biased(candidate.predicted_us, candidate.decision)

    found._runner.time = time
    for rows in (64, 128, 192, 256, 320):
        found.add([NewKernel(product(rows, 128 + rows), ["matmul"])])[0].progress.weight = 1
    found.run(Budget(120))
    found.refit()
    model = found.models[plain.search.spaces[0].template]
    assert model.used and model.after > model.before and model.powers["tile.columns"] > 0.2
    fresh = tuner(tmp_path / "refit", FakeRunner(time_of))
    assert fresh.models == found.models
    times = [
        min(biased(c.predicted_us, c.decision) for c in kernel.search.first(8))
        for kernel in (fresh.add([NewKernel(product(512, 384), ["matmul"])])[0], plain)
    ]
    assert times[0] < 0.9 * times[1]
    # What would be compiled without tuning is still the first.
    assert fresh.kernels.popitem()[1].search.first(1) == plain.search.first(1)


def test_a_damaged_model_is_no_obstacle(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    found.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
    found.run(Budget(24))
    path = found.records.folder / "model.json"
    path.write_text("{")
    with pytest.warns(UserWarning, match="is ignored") as told:
        again = tuner(tmp_path, FakeRunner(time_of))
    assert len(told) == 1
    again.refit()
    assert "devices" in path.read_text()


class Slow(FakeBuilder):
    """Compiles nothing until it is told to, and notes how much it was given meanwhile."""

    def __init__(self):
        super().__init__()
        self.futures = []

    def submit(self, requests):
        """Answer later."""
        self.requests += requests
        made = [(Future(), request) for request in requests]
        self.futures += made
        return [future for future, _ in made]

    def finish(self):
        """Answer all but those that were cancelled."""
        made, self.futures = self.futures, []
        for future, request in made:
            if future.set_running_or_notify_cancel():
                future.set_result(self.made(request))


def test_batches_of_several_kernels_are_compiled_ahead(tmp_path):
    builder, seen = Slow(), []

    class Runner(FakeRunner):
        def run(self, requests):
            seen.append(len(builder.requests) - len(self.ran))
            return super().run(requests)

    found = tuner(tmp_path, Runner(time_of), builder, ahead=24)
    for rows in (64, 128, 192, 256):
        found.add([NewKernel(product(rows), ["matmul"])])[0].progress.weight = 1
    timer = threading.Thread(target=answer, args=(builder, lambda: found.trials >= 80), daemon=True)
    timer.start()
    found.run(Budget(80))
    timer.join(10)
    assert found.trials == len(set(found._runner.ran)) == 80
    # Of the first batches of eight three are compiled; later ones are of sixteen.
    assert seen[0] == 24 and max(seen) <= 24 + 16


def answer(builder, is_over):
    """Finish what is compiled, again and again."""
    while not is_over():
        builder.finish()
        time.sleep(0.01)


def test_what_was_compiled_ahead_is_dropped_when_the_time_is_up_and_tried_later(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    kernels = [found.add([NewKernel(product(rows), ["matmul"])])[0] for rows in (64, 128, 192)]
    for kernel in kernels:
        kernel.progress.weight = 1
    first = [list(kernel.waiting) for kernel in kernels]
    found.report = lambda: setattr(found, "stopping", True)
    found.run(Budget(64))
    assert found.trials == len(first[0]) and [k.waiting for k in kernels[1:]] == first[1:]
    found.report, found.stopping = None, False
    found.run(Budget(64))
    assert found.trials == 64 == len(set(found._runner.ran))
    tried = {(t.kernel, t.decision) for t in found.records}
    assert {(k.digest, c.decision) for k, c in zip(kernels, first, strict=True) for c in c} <= tried


def test_a_kernel_without_a_reference_is_not_tuned_and_says_why(tmp_path):
    found = tuner(tmp_path, FakeRunner(time_of))
    bad, good = (found.add([NewKernel(product(rows), ["matmul"])])[0] for rows in (64, 128))
    bad.progress.weight = good.progress.weight = 1
    make = found._references.submit
    found._references.submit = lambda sources: (
        [done("it has no reference")] if sources[0].kernel == bad.digest else make(sources)
    )
    found.run(Budget(32))
    assert bad.problem == "it has no reference" and bad.trials == 0 and good.trials == 32


class WhenAsked(Future):
    """A future that is not done until someone waits for it."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def result(self, timeout=None):
        """Make the result now."""
        if not self.done():
            self.set_result(self.make())
        return super().result(timeout)


def test_what_was_measured_before_an_interrupt_is_on_record(tmp_path):
    """One by one, as candidates are compiled: nothing that was measured is lost with the rest of its batch."""
    builder = FakeBuilder()
    builder.submit = lambda requests: [WhenAsked(lambda r=r: builder.made(r)) for r in requests]
    found = tuner(tmp_path, FakeRunner(time_of, stop=3), builder)
    found.add([NewKernel(product(), ["matmul"])])[0].progress.weight = 1
    with pytest.raises(KeyboardInterrupt):
        found.run(Budget(16))
    assert len(WorkDir(tmp_path).open("sm_90", "float16")) == 3


def test_how_fast_candidates_are_compiled_changes_nothing(tmp_path):
    ran = []
    for name in "ab":
        builder = FakeBuilder()
        if name == "b":
            builder.submit = lambda requests, b=builder: [
                WhenAsked(lambda r=r: b.made(r)) for r in requests
            ]
        found = tuner(tmp_path / name, FakeRunner(time_of), builder)
        for rows in (64, 128):
            found.add([NewKernel(product(rows), ["matmul"])])[0].progress.weight = 1
        found.run(Budget(64))
        ran.append(found._runner.ran)
    assert ran[0] == ran[1] and len(ran[0]) == 64


@pytest.mark.parametrize("seed", [0, 4])
def test_the_best_is_found_where_the_model_is_wrong(tmp_path, seed):
    """Each value of each choice, and some pairs, make a kernel slower or faster than predicted, by 15 % as a rule."""

    def factor(decision):
        entries = list(decision)
        several = [(e,) for e in entries] + [(entries[a], entries[b]) for a, b in ((0, 1), (3, 4))]
        chance = (random.Random(repr((seed, *some))).gauss(0, 0.15) for some in several)
        return math.exp(sum(chance))

    def time(kernel, template, decision):
        if template != space.template:
            return 100.0
        key = tuple(decision.items())
        return predicted[key] * factor(key)

    found = tuner(tmp_path, FakeRunner(time))
    kernel = found.add([NewKernel(product(512, 384), ["matmul"])])[0]
    space = kernel.search.spaces[0]
    (point,) = space.points
    predicted = dict(zip(point.options, point.microseconds, strict=True))
    kernel.progress.weight = 1
    found.run(Budget(96))
    optimum = min(us * factor(decision) for decision, us in predicted.items())
    assert kernel.best_us <= 1.1 * optimum < 1.3 * optimum < kernel.default_us
    # The template that is far slower costs little.
    assert sum(t.template != space.template for t in found.records) <= 6


def test_every_option_is_found_again_by_its_decision(tmp_path):
    """Tiles of the copy engine consist of more numbers than others; one tile's may be among another's."""
    found = tuner(tmp_path, FakeRunner(time_of))
    search = found.add([NewKernel(product(1024, 1024, 1024), ["matmul"])])[0].search
    (space,) = [s for s in search.spaces if s.template == "tensor_core"]
    (point,) = [p for p in space.points if p.name == "tile"]
    assert len({len(option) for option in point.options}) == 2
    for option in point.options:
        candidate = search.candidate_of("tensor_core", option)
        assert candidate is not None and candidate.decision == option
    assert search.candidate_of("tensor_core", (*point.options[0], ("other", 1))) is None
