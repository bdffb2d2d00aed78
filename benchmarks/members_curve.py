"""How many parallel convolutions one kernel should hold: 2 to 12 members against their parts.

Parallel convolutions (3×3, 64 channels, ReLU after each so that the sum does not collapse),
128×128 and 14×14, summed or returned apart, on one input or on one each. For each number
of members: predicted, and with ``--times`` or on a GPU measured, microseconds of one kernel for all,
of one kernel per branch (vertical), of one per operator, and what the planner chooses.

    python benchmarks/members_curve.py                                      # predicted, cuda:sm_90
    python benchmarks/members_curve.py --target cuda --dtype float16        # measured as well
    python benchmarks/members_curve.py --save kernels.xz                    # for kernel_times.py --load
    python benchmarks/members_curve.py --times benchmarks/results/kernels-h200.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from kernel_list import Kernel, kernel_of_proposal, kernels_of_lowered, prepare, save_kernels
from kernel_times import measure, read_table

import tvm_fusion as tf
from tvm_fusion.build.model import lower_plan, unfused_plan
from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import LoweringError
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.planner.plan import Plan
from tvm_fusion.strategies import Horizontal
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import parse_target, runs_here
from tvm_fusion.testing.modules import parallel_convs

#: Builder options of each case.
CASES: Mapping[str, Mapping[str, Any]] = {
    "one input, summed": {"join": "add"},
    "one input, apart": {"join": None},
    "own inputs, summed": {"join": "add", "separate": True},
    "own inputs, apart": {"join": None, "separate": True},
}
#: One kernel for all, one per branch, one per operator, the planner's choice.
SIDES = ("one", "vertical", "unfused", "planned")


@dataclasses.dataclass
class Point:
    """One case at one number of members; for each side its kernels and its prediction."""

    case: str
    size: int
    dtype: str
    members: int
    kernels: dict[str, list[Kernel]]
    predicted: dict[str, float]
    chosen: str

    def measured(self, times: Mapping[str, float]) -> dict[str, float]:
        """Sum of each side's kernels; NaN where one was not measured."""
        return {
            side: sum(times.get(k.row["hash"], math.nan) * k.row["calls"] for k in kernels)
            for side, kernels in self.kernels.items()
        }


def whole(module: tvm.IRModule, members: int) -> Proposal | None:
    """The proposal that holds every branch apart in one kernel."""
    graph = from_relax(module).graph
    config = FusionConfig(max_members=max(12, members))
    for proposal in Horizontal().propose(graph, config):
        if len(proposal.operators) == len(graph.operators):
            return proposal
    return None


def point(case: str, size: int, dtype: str, members: int, target: Any) -> Point:
    """Build, plan and lower one case."""
    layout = "NCHW" if dtype == "float32" else "NHWC"
    options = dict(CASES[case], spatial=size, dtype=dtype, layout=layout, relu=True)
    module = prepare(parallel_convs(members, **options), target)
    found, name = from_relax(module), f"{case}, {size}, {members}"
    planned = tf.plan(module, target, FusionConfig(max_members=12), name=name)
    vertical = tf.plan(module, target, FusionConfig(strategies=("vertical",)), name=name)
    kernels, predicted = {}, {}

    def lowered(plan: Plan) -> list[Kernel]:
        return list(kernels_of_lowered(name, found, lower_plan(module, plan, target), target))

    for side, plan in (("vertical", vertical), ("planned", planned)):
        kernels[side], predicted[side] = lowered(plan), plan.totals.predicted_us_after
    kernels["unfused"] = lowered(unfused_plan(planned))
    predicted["unfused"] = planned.totals.predicted_us_before
    proposal = whole(module, members)
    if proposal is not None:
        try:
            kernels["one"] = [kernel_of_proposal(name, module, proposal, target)]
            predicted["one"] = kernels["one"][0].row["predicted_us"]
        except LoweringError as error:
            print(f"{name}: one kernel is not possible: {error}")
    return Point(case, size, dtype, members, kernels, predicted, _chosen(planned))


def _chosen(plan: Plan) -> str:
    """What the planner made of the branches, and the reasons of what it did not."""
    groups = [
        " ".join(filter(None, (g.strategy, g.options.get("form"), str(g.members))))
        for g in plan.groups
        if g.members > 1
    ]
    text = f"{plan.totals.launches_after} launches: {', '.join(groups) or 'vertical'}"
    reasons = sorted({r.reason for r in plan.rejected if r.strategy != "vertical"})
    return text + (f"; refused: {', '.join(reasons)}" if reasons else "")


def points(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    members: Sequence[int],
    target: Any,
    cases: Sequence[str] = tuple(CASES),
) -> Iterator[Point]:
    """Yield every point of the curve."""
    for dtype in dtypes:
        for case in cases:
            for size in sizes:
                for count in members:
                    yield point(case, size, dtype, count, target)


def as_row(p: Point, times: Mapping[str, float]) -> dict[str, Any]:
    """One line of the table as plain values."""
    measured = p.measured(times) if times else {}
    return {
        "case": p.case,
        "size": p.size,
        "dtype": p.dtype,
        "members": p.members,
        "launches": {s: sum(k.row["calls"] for k in ks) for s, ks in p.kernels.items()},
        "predicted_us": {s: round(p.predicted[s], 3) for s in SIDES if s in p.predicted},
        "measured_us": {s: round(v, 3) for s, v in measured.items() if not math.isnan(v)},
        "chosen": p.chosen,
    }


def as_text(row: Mapping[str, Any]) -> str:
    """One line of the table as Markdown."""
    cells = [row["case"], f"{row['size']}²", row["dtype"], str(row["members"])]
    for kind in ("predicted_us", "measured_us"):
        cells += [f"{row[kind][s]:.1f}" if s in row[kind] else "" for s in SIDES]
    return "| " + " | ".join([*cells, row["chosen"]]) + " |"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--dtype", action="append", help="repeatable; default: float32 and float16")
    parser.add_argument("--size", type=int, action="append", help="repeatable; default: 128 and 14")
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="repeatable; default: all"
    )
    parser.add_argument("--members", type=int, nargs="*", default=list(range(2, 13)))
    parser.add_argument("--times", type=Path, help="measured kernels, written by kernel_times.py")
    parser.add_argument("--save", type=Path, help="write the kernels for kernel_times.py --load")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    target = parse_target(args.target)
    sizes, dtypes = args.size or [128, 14], args.dtype or ["float32", "float16"]
    found = list(points(sizes, dtypes, args.members, target, args.case or list(CASES)))
    kernels = {k.row["hash"]: k for p in found for ks in p.kernels.values() for k in ks}
    if args.save:
        save_kernels(args.save, list(kernels.values()))
        return
    times: dict[str, float] = {}
    if args.times:
        times = {r["hash"]: r["measured_us"] for r in read_table(args.times)[1] if r["measured_us"]}
    elif args.target == "cuda" and runs_here(target):
        items = [
            {"row": k.row, "outputs": k.outputs, "func": tvm.ir.save_json(k.func)}
            for k in kernels.values()
        ]
        rows = measure(items, args.target, jobs=max(1, (os.cpu_count() or 2) - 1))
        times = {r["hash"]: r["measured_us"] for r in rows if r.get("measured_us")}
    rows = [as_row(p, times) for p in found]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    heads = [f"{kind} {side}" for kind in ("predicted", "measured") for side in SIDES]
    print("| " + " | ".join(["case", "size", "dtype", "members", *heads, "planner"]) + " |")
    print("|" + " --- |" * (len(heads) + 5))
    for row in rows:
        print(as_text(row))


if __name__ == "__main__":
    main()
