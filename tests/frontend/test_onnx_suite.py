"""The onnx package's backend suite: every case is right, or refused and on record.

``onnx_suite.json`` is the record, written by ``python -m tvm_fusion.testing.onnx_table``. A case
that is refused and not on record fails, and so does one on record that is refused no more, so
that the refusals only become fewer. The fast tests run one case of each operator.
"""

from __future__ import annotations

import json
import zlib

import onnx
import pytest

from tvm_fusion.testing.lasting_worker import LastingWorker
from tvm_fusion.testing.onnx_suite import Outcome
from tvm_fusion.testing.onnx_table import (
    LIMIT,
    MODULE,
    PAGE,
    RECORD,
    cases,
    page_text,
    record_of,
    run_cases,
)

DATA = json.loads(RECORD.read_text(encoding="utf-8"))
VERDICTS = {
    operator: {name: verdict for verdict in ("right", "refused") for name in entry[verdict]}
    for operator, entry in DATA["operators"].items()
}

#: Operators with most cases are split, so that no test takes minutes.
PART = 40

same_suite = pytest.mark.skipif(
    onnx.__version__ != DATA["onnx"], reason="the record is of another version of onnx"
)


@pytest.fixture(scope="module")
def worker():
    with LastingWorker(MODULE, LIMIT) as started:
        yield started


def sample(names):
    """Return one case: the same each time, and no favourite."""
    return [min(names, key=lambda name: zlib.crc32(name.encode()))]


def parts():
    for operator, verdicts in VERDICTS.items():
        names = sorted(verdicts)
        for start in range(0, len(names), PART):
            yield pytest.param(operator, names[start : start + PART], id=f"{operator}-{start}")


def check(operator, names, worker):
    verdicts = VERDICTS[operator]
    wrong = [
        f"{o.name} is {o.verdict}, on record as {verdicts[o.name]}: {o.reason}"
        for o in run_cases(names, worker)
        if o.verdict != verdicts[o.name]
    ]
    assert not wrong, "\n".join([*wrong, "see python -m tvm_fusion.testing.onnx_table"])


@same_suite
@pytest.mark.parametrize("operator", VERDICTS)
def test_one_case_of_each_operator(operator, worker):
    check(operator, sample(VERDICTS[operator]), worker)


@same_suite
@pytest.mark.slow
@pytest.mark.parametrize(("operator", "names"), list(parts()))
def test_all_cases(operator, names, worker):
    check(operator, names, worker)


@same_suite
@pytest.mark.slow
def test_the_record_has_every_case():
    recorded = {name for verdicts in VERDICTS.values() for name in verdicts}
    assert recorded == set(cases())


def test_the_page_shows_the_record():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_text(DATA, page)


def test_most_float_cases_are_right():
    floats = set(DATA["float_inference"])
    right = floats & {
        n for v in VERDICTS.values() for n, verdict in v.items() if verdict == "right"
    }
    assert len(right) >= 0.85 * len(floats)


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "raised", "unclear"])
def test_a_record_holds_nothing_wrong(verdict):
    with pytest.raises(ValueError, match=f"{verdict} node/test_add: why"):
        record_of([Outcome("node/test_add", "Add", verdict, "why")])
