"""How reports name things: strategies, options, operators, counts. Text and HTML share it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..planner.plan import Group, Plan

#: One letter for each strategy, so that no report says it by colour alone.
LETTERS: Mapping[str, str] = {"vertical": "V", "horizontal": "H", "cross": "X", "compound": "C"}

#: What each strategy fuses, in one line.
STRATEGY_MEANING: Mapping[str, str] = {
    "vertical": "a chain of producers and consumers",
    "horizontal": "independent branches side by side",
    "cross": "branches and the join that they meet in",
    "compound": "several strategies in one kernel",
}

#: Each value of each option of a group, in words.
OPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "form": {
        "collapsed": "one convolution with the added weights",
        "merged": "one anchor with concatenated weights",
        "joined": "every anchor in the registers of one block",
        "elementwise": "one pointwise kernel",
        "partitioned": "blocks divided among the members",
        "back_to_back": "two anchors, the first one's tile kept on chip",
        "anchor_row": "a product and the normalisation of its rows, each in one block or one cluster",
        "attention": "queries, keys, softmax and values, without scores in memory",
    },
    "join": {
        "apart": "results returned apart",
        "add": "results added",
        "maximum": "maximum of the results",
        "minimum": "minimum of the results",
        "multiply": "results multiplied",
        "mixed": "results joined by several operators",
        "concat": "results concatenated",
    },
    "balance": {
        "pad": "balanced: the lighter kernel zero-padded to the heavier one's size",
        "warps": "balanced: every warp works on each branch in turn",
    },
    "shortcut": {"identity": "one branch is a shortcut without work"},
    "stage": {"shared": "results staged through shared memory before the epilogue"},
}


def options_in_words(options: Mapping[str, str]) -> list[str]:
    """Say what a group's options mean, one phrase each; an unknown value as ``key=value``."""
    return [
        OPTION_WORDS.get(key, {}).get(options[key], f"{key}={options[key]}")
        for key in sorted(options, key=[*OPTION_WORDS, *options].index)
    ]


def describe_operators(group: Group) -> str:
    """Operator types in order; equal branches once, with their number; the middle of a long list cut."""
    if group.members < 2:
        return " + ".join(_cut(group.operators))
    op_of = dict(zip(group.nodes, group.operators, strict=True))
    branches = [" + ".join(_cut([op_of[n] for n in branch])) for branch in group.branches]
    parts = [
        f"{count} × ({text})" if count > 1 else f"({text})" for text, count in _counted(branches)
    ]
    inside = {n for branch in group.branches for n in branch}
    rest = [op for n, op in zip(group.nodes, group.operators, strict=True) if n not in inside]
    joined = _cut([f"{count} × {op}" if count > 1 else op for op, count in _counted(rest)])
    form = group.options.get("form")
    tail = f" ({form})" if form else ""
    return " | ".join(parts) + "".join(f" + {text}" for text in joined) + tail


def _counted(texts: Iterable[str]) -> list[tuple[str, int]]:
    return [(text, len(list(same))) for text, same in itertools.groupby(texts)]


def _cut(texts: Sequence[str]) -> list[str]:
    """At most 12 texts, the middle ones replaced by their number."""
    if len(texts) <= 12:
        return list(texts)
    return [*texts[:6], f"… {len(texts) - 9} more …", *texts[-3:]]


def span(nodes: Sequence[str]) -> str:
    """One or two names as they are, of more the first and the last."""
    return ", ".join(nodes) if len(nodes) <= 2 else f"{nodes[0]} … {nodes[-1]}"


def mib(count: float) -> str:
    """Bytes as MiB with one decimal, with more where one would show zero."""
    value = count / 2**20
    return f"{value:.1f}" if value >= 0.05 or value == 0 else f"{value:.2g}"


def microseconds(value: float) -> str:
    """A time with about three significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def change(before: float, after: float) -> str:
    """Relative change, as ``−35 %`` or, of a large gain, ``×12``; empty where there is none to tell."""
    if before <= 0:
        return ""
    if after >= 3 * before:
        return f"×{after / before:.3g}"
    percent = round((after / before - 1) * 100)
    return f"{'−' if percent < 0 else '+' if percent > 0 else '±'}{abs(percent)} %"


def numbers_in_words(numbers: Mapping[str, Any]) -> str:
    """The figures behind a verdict, as ``ratio 4.2, limit 3``."""
    return ", ".join(f"{key.replace('_', ' ')} {_value(v)}" for key, v in numbers.items())


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "×".join(map(str, value)) if all(isinstance(v, int) for v in value) else (
            ", ".join(map(str, value))
        )  # fmt: skip
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def search_in_words(plan: Plan) -> str:
    """How the groups were chosen, in a sentence; empty if the plan does not say."""
    if plan.pipeline == "tvm":
        return "none: TVM's default pipeline was measured faster than any plan"
    if plan.pipeline == "untuned":
        untuned = dataclasses.replace(plan, pipeline="tvm_fusion")
        told = (search_in_words(untuned), "as without tuning, which was measured faster")
        return "; ".join(filter(None, told))
    search = plan.search
    if not search.regions:
        return ""
    regions = f"{search.regions} region{'s' if search.regions > 1 else ''}"
    if not search.bounded:
        each = "each " if search.regions > 1 else ""
        return f"{regions} of competing groups, {each}solved to the least predicted time"
    return (
        f"{regions} of competing groups: {search.exact} solved to the least predicted time, "
        f"{search.bounded} within {search.gap_us:.2g} µs of it"
    )


def dtype_in_words(plan: Plan) -> str:
    """Element type of a model, and what kernels compute in where that is another."""
    if plan.float32_products == "tf32":
        return f"{plan.dtype}, float32 products in TF32"
    wide = plan.dtype == "bfloat16" or (plan.dtype == "float16" and plan.target.kind == "cuda")
    if wide or (plan.dtype == "float16" and plan.numerics == "strict"):
        inside = "rounded" if plan.numerics == "strict" else "kept in float32"
        return f"{plan.dtype}, {inside} between the operators of a kernel"
    return plan.dtype


def accuracy_in_words(plan: Plan) -> list[str]:
    """How far the estimates were from what the compiler says, one sentence a resource.

    The error is the mean of ``|estimate - actual| / actual`` over the groups that have both; a
    group that takes none of a resource counts by whether the estimate says so too.
    """
    out = []
    for what, field, actual in (
        ("registers", "estimated_registers", "registers"),
        ("shared memory", "estimated_shared_bytes", "shared_bytes"),
    ):
        pairs = [(getattr(g, field), getattr(g, actual)) for g in plan.groups]
        errors = list(_errors(pairs))
        if errors:
            mean = round(100 * sum(errors) / len(errors))
            kernels = f"{len(errors)} kernel{'s' if len(errors) > 1 else ''}"
            out.append(f"{what} estimated within {mean} % on average ({kernels})")
    return out


def _errors(pairs: Iterable[tuple[int | None, int | None]]) -> Iterable[float]:
    for estimate, actual in pairs:
        if estimate is not None and actual is not None and (estimate or actual):
            yield abs(estimate - actual) / actual if actual else 1.0
