"""PyTorch's operator database: every sample is right, or refused and on record.

``torch_opdb.json`` is the record, written by ``python -m tvm_fusion.testing.torch_opdb_table``. A sample that is
refused and not on record fails, and so does one on record that is refused no more, so that the refusals only become
fewer. The fast tests run a few operators.
"""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch.testing._internal imports it

from tvm_fusion.testing.lasting_worker import LastingWorker  # noqa: E402
from tvm_fusion.testing.torch_opdb import LIMIT, Outcome, run_samples  # noqa: E402
from tvm_fusion.testing.torch_opdb_table import (  # noqa: E402
    LETTERS,
    MODULE,
    PAGE,
    RECORD,
    page_text,
    record_of,
)

pytestmark = pytest.mark.torch

DATA = json.loads(RECORD.read_text(encoding="utf-8"))

same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != DATA["torch"],
    reason="the record is of another version of torch",
)

#: Operators of one test.
PART = 12
NAMES = list(DATA["operators"])
PARTS = [NAMES[start : start + PART] for start in range(0, len(NAMES), PART)]
FEW = ("add", "argmax", "softmax", "var_mean", "nn_functional_grid_sample", "sort", "kthvalue")


@pytest.fixture(scope="module")
def worker():
    with LastingWorker(MODULE, LIMIT) as started:
        yield started


def check(names, worker):
    wrong = []
    for name in names:
        recorded = DATA["operators"][name]
        requests = [(name, number) for number in range(len(recorded))]
        for outcome, letter in zip(run_samples(requests, worker), recorded, strict=True):
            if LETTERS.get(outcome.verdict) != letter:
                wrong.append(f"{outcome} is on record as {letter}")
    assert not wrong, "\n".join([*wrong, "see python -m tvm_fusion.testing.torch_opdb_table"])


@same_torch
def test_a_few_operators(worker):
    check(FEW, worker)


@same_torch
@pytest.mark.slow
@pytest.mark.parametrize("names", PARTS, ids=[part[0] for part in PARTS])
def test_all_operators(names, worker):
    check(names, worker)


def test_the_page_shows_the_record():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_text(DATA, page)


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "raised", "unclear"])
def test_a_record_holds_nothing_wrong(verdict):
    with pytest.raises(ValueError, match=f"{verdict} add 0: why"):
        record_of([Outcome("add", 0, verdict, "why")])
