"""Trials as lines, and the set that keeps the latest of each."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.trials import NewerSchema, Trial, TrialSet, parse_line, trial_digest

#: Few values each, so that trials meet.
TRIALS = st.builds(
    trial,
    kernel=st.sampled_from(["k0", "k1"]),
    rows=st.integers(1, 3),
    us=st.sampled_from([None, 1.0, 2.0, 3.5]),
    device=st.sampled_from(["one", "two"]),
    date=st.sampled_from(["2026-01-01", "2026-01-02"]),
    registers=st.sampled_from([None, 32]),
)


def test_a_line_gives_the_trial_back() -> None:
    full = Trial(
        kernel="k", template="t", decision=(("tile.rows", 64), ("how", "ldmatrix")), verdict="ok",
        arch="sm_90", samples_us=(2.5, 3), registers=40, spill_bytes=0, shared_bytes=1024,
        code="abc", device="a GPU", driver="580", operators=("conv2d", "relu"),
    )  # fmt: skip
    line = full.to_line()
    assert "\n" not in line
    assert Trial.from_dict(parse_line(line)) == full
    assert list(json.loads(line))[:3] == ["schema", "kernel", "trial"]
    assert full.microseconds == 2.75
    assert full.date.endswith("+00:00")


def test_empty_texts_for_people_are_left_out() -> None:
    assert not {"operators", "message"} & trial().to_dict().keys()
    assert trial(us=None, message="3 spills").to_dict()["message"] == "3 spills"


def test_a_failed_trial_has_no_time() -> None:
    assert trial(us=None).microseconds == math.inf
    assert trial(verdict="wrong").microseconds == math.inf


def test_the_digest_is_stable_and_of_everything_that_was_tried() -> None:
    decision = (("rows", 64), ("columns", 128))
    digest = trial_digest("k", "t", decision)
    assert digest == "7e9a46e31c48bb62"
    assert trial_digest("k", "t", decision[::-1]) == digest
    others = [("l", "t", decision), ("k", "u", decision), ("k", "t", decision[:1])]
    assert len({digest, *(trial_digest(*other) for other in others)}) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "ok", "samples_us": ()},
        {"samples_us": (0.0,)},
        {"samples_us": (math.nan,)},
        {"samples_us": (math.inf,)},
        {"samples_us": (10**400,)},
        {"samples_us": (True,)},
        {"registers": -1},
        {"spill_bytes": 1.5},
        {"kernel": ""},
        {"device": None},
        {"operators": (1,)},
        {"decision": (("rows", 1.5),)},
        {"decision": (("rows", True),)},
        {"decision": (("rows", 1), ("rows", 2))},
        {"decision": (("rows",),)},
    ],
)
def test_illegal_trials_are_refused(fields) -> None:
    legal = trial()
    with pytest.raises(ValueError, match="of a trial must be"):
        Trial(**{name: getattr(legal, name) for name in legal.__dataclass_fields__} | fields)


DAMAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"9" * 10_000,
    b'{"schema": 1}',
    b'{"schema": "1"}',
    b'{"schema": true}',
]


@pytest.mark.parametrize("line", DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        Trial.from_dict(parse_line(line))
    assert not isinstance(caught.value, NewerSchema)


@given(st.data())
def test_a_line_with_any_field_spoilt_is_refused_or_legal(data) -> None:
    """Nothing but ValueError comes out, whatever stands in a field."""
    fields = trial().to_dict()
    name = data.draw(st.sampled_from(sorted(fields)))
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    junk |= st.lists(junk, max_size=2) | st.dictionaries(st.text(max_size=2), junk, max_size=2)
    fields[name] = data.draw(junk)
    try:
        read = Trial.from_dict(json.loads(json.dumps(fields)))
    except ValueError:
        return
    assert read.trial == fields["trial"]
    read.to_line()


@pytest.mark.parametrize("name", ["kernel", "template", "decision"])
def test_a_digest_of_something_else_is_damage(name: str) -> None:
    fields = trial().to_dict()
    fields[name] = {"rows": 65} if name == "decision" else "other"
    with pytest.raises(ValueError, match="trial of a trial"):
        Trial.from_dict(fields)


def test_a_later_schema_is_told_apart_and_unknown_names_are_skipped() -> None:
    with pytest.raises(NewerSchema):
        Trial.from_dict({"schema": 2, "anything": []})
    assert Trial.from_dict({**trial().to_dict(), "new": 1}) == trial()


def test_the_latest_of_a_trial_counts() -> None:
    early, late = trial(us=1.0, date="2026-01-01"), trial(us=3.0, date="2026-01-02")
    for order in ([early, late], [late, early]):
        assert list(TrialSet(order)) == [late]
    other = trial(us=2.0, device="another GPU")
    both = TrialSet([early, late, other])
    assert both.trials("k0") == [late, other]
    assert both.trials("k0", device="another GPU") == [other]
    assert both.best("k0") == other
    assert both.best("k0", device="a GPU") == late
    assert both.trials("k1") == [] and both.best("k1") is None and both.kernels() == ["k0"]


def model(trials: list[Trial]) -> dict[tuple[str, str, str], Trial]:
    """What a set of trials holds, said plainly."""
    kept = {}
    for one in sorted(trials, key=lambda t: (t.date, t.to_line())):
        kept[one.trial, one.arch, one.device] = one
    return kept


@given(st.lists(TRIALS, max_size=12), st.randoms(use_true_random=False))
def test_content_does_not_depend_on_order_or_repeats(trials, random) -> None:
    shuffled = random.sample(trials, len(trials))
    whole = TrialSet(trials)
    assert set(whole) == set(TrialSet(shuffled + trials)) == set(model(trials).values())
    assert len(whole) == len(model(trials))
    for kernel in ("k0", "k1"):
        right = [t for t in model(trials).values() if (t.kernel, t.verdict) == (kernel, "ok")]
        best = whole.best(kernel)
        assert (best is None) == (not right)
        if best is not None:
            assert best in right
            times = [statistics.median(t.samples_us) for t in right]
            assert statistics.median(best.samples_us) == min(times)
            assert best == TrialSet(shuffled).best(kernel)
