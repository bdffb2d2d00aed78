"""Words that the reports share."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.config import STRATEGIES
from tvm_fusion.planner import Plan, Search, TargetInfo
from tvm_fusion.report import words
from tvm_fusion.strategies.base import OPTIONS


def test_everything_has_words() -> None:
    assert {key: set(found) for key, found in words.OPTION_WORDS.items()} == {
        key: set(values) for key, values in OPTIONS.items()
    }
    assert tuple(words.LETTERS) == tuple(words.STRATEGY_MEANING) == STRATEGIES
    assert len(set(words.LETTERS.values())) == len(STRATEGIES)


def test_options_in_words() -> None:
    told = words.options_in_words({"shortcut": "identity", "form": "joined", "later": "on"})
    assert told == [
        "every anchor in the registers of one block", "one branch is a shortcut without work",
        "later=on",
    ]  # fmt: skip


def test_operators(plan) -> None:
    stem, cross = plan.groups[:2]
    assert words.describe_operators(stem) == "conv2d + relu"
    assert words.describe_operators(cross) == "2 × (conv2d + relu) + add (joined)"
    other = dataclasses.replace(cross, operators=("conv2d", "relu", "conv2d", "tanh", "add"))
    assert words.describe_operators(other) in (
        "(conv2d + relu) | (conv2d + tanh) + add (joined)",
        "(conv2d + tanh) | (conv2d + relu) + add (joined)",
    )


def test_long_chains_are_cut(plan) -> None:
    names = tuple(f"op{i}" for i in range(40))
    long = dataclasses.replace(plan.groups[0], operators=names, nodes=names, branches=(names,))
    text = words.describe_operators(long)
    assert text == "op0 + op1 + op2 + op3 + op4 + op5 + … 31 more … + op37 + op38 + op39"
    twelve = dataclasses.replace(
        long, operators=names[:12], nodes=names[:12], branches=(names[:12],)
    )
    assert "more" not in words.describe_operators(twelve)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(10, 5, "−50 %"), (10, 10, "±0 %"), (10, 12, "+20 %"), (10, 730, "×73"), (0, 5, "")],
)
def test_changes(before, after, text) -> None:
    assert words.change(before, after) == text


def test_numbers() -> None:
    numbers = {"work_ratio": 4.251, "max_work_ratio": 3.0, "flops": 1234567, "shape": (1, 3)}
    assert (
        words.numbers_in_words(numbers)
        == "work ratio 4.251, max work ratio 3, flops 1,234,567, shape 1×3"
    )
    assert (
        words.numbers_in_words({"ops": ("conv2d", "add"), "ok": True}) == "ops conv2d, add, ok True"
    )
    assert [words.mib(v) for v in (0, 3 * 2**20, 2**10)] == ["0.0", "3.0", "0.00098"]


def test_the_search(plan) -> None:
    def told(**changes):
        return words.search_in_words(dataclasses.replace(plan, **changes))

    assert told(search=Search()) == ""
    assert told(search=Search(1, 1)).startswith("1 region of competing groups, solved")
    several = told(search=Search(4, 3, 1, 1.25))
    assert several.endswith("3 solved to the least predicted time, 1 within 1.2 µs of it")
    assert told(pipeline="tvm") == "none: TVM's default pipeline was measured faster than any plan"
    untuned = "as without tuning, which was measured faster"
    assert told(pipeline="untuned", search=Search()) == untuned
    assert told(pipeline="untuned", search=Search(2, 2)).endswith(f"predicted time; {untuned}")
    assert untuned not in told(search=Search(2, 2))


def test_accuracy_is_the_mean_relative_error(plan) -> None:
    def group(estimate, actual, shared=(None, None)):
        return dataclasses.replace(
            plan.groups[0], estimated_registers=estimate, registers=actual,
            estimated_shared_bytes=shared[0], shared_bytes=shared[1],
        )  # fmt: skip

    def told(*groups):
        return words.accuracy_in_words(Plan("m", TargetInfo("cuda"), "float32", 1, groups))

    assert told(group(40, None), group(None, 32)) == []
    assert told(group(40, 50), group(60, 50), group(50, None)) == [
        "registers estimated within 20 % on average (2 kernels)"
    ]
    # None of it, rightly, is no case; some where there is none is an error of 100 %.
    assert told(group(None, None, (0, 0))) == []
    assert told(group(None, None, (512, 0))) == [
        "shared memory estimated within 100 % on average (1 kernel)"
    ]
