"""How the time of planning grows with the model: elementwise diamonds, and a ResNet-like network.

Prints one row per model: operators, seconds of the clean-up (``tf.transform.Canonicalize``), seconds
of ``tf.plan`` on the result, the ratio to the row before, groups, and the regions that the search
solved exactly or only within a bound. No GPU is needed; plans are made for an sm_90. Planning runs in
one thread, and seconds are its processor time, which other programs on the machine stretch less than
the time on the wall.

    python benchmarks/planner_scaling.py                  # the table
    python benchmarks/planner_scaling.py --json           # the same as JSON
    python benchmarks/planner_scaling.py --check          # also fail when planning is too slow

``--check`` exits with 1 if planning 5,000 operators takes over 2 s, or over 4 times as long as 2,000.
Each model is planned ``--repeat`` times, and the fastest run counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable

import tvm_fusion as tf
from tvm_fusion.compat import tvm
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.synthetic_blocks import diamonds

SIZES = (500, 1000, 2000, 5000)
TARGET = "cuda:sm_90"

#: The limits of ``--check``.
MAX_SECONDS, MAX_RATIO = 2.0, 4.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One model: operators that do work, seconds of clean-up and planning, and what came out."""

    model: str
    operators: int
    cleanup_seconds: float
    seconds: float
    groups: int
    exact_regions: int
    bounded_regions: int


def resnet_like(blocks: int) -> tvm.IRModule:
    """Bottlenecks with identity shortcuts in a row: ten operators each, on [1, 64, 14, 14]."""
    b = ModuleBuilder()
    x = b.input("x", (1, 64, 14, 14))
    for i in range(blocks):
        y = b.relu(f"reduce{i}_relu", b.bias(f"reduce{i}_bias", b.conv(f"reduce{i}", x, 16, 1)))
        y = b.relu(f"middle{i}_relu", b.bias(f"middle{i}_bias", b.conv(f"middle{i}", y, 16)))
        y = b.bias(f"expand{i}_bias", b.conv(f"expand{i}", y, 64, 1))
        x = b.relu(f"out{i}", b.add(f"shortcut{i}", y, x))
    return b.finish(x)


def measure(model: str, module: tvm.IRModule, repeat: int) -> Row:
    """Clean a module up, then plan it a few times; the fastest run counts."""
    start = time.process_time()
    canonical = tf.transform.Canonicalize()(module)
    cleanup = time.process_time() - start
    seconds = []
    for _ in range(repeat):
        gc.collect()  # so that no run pays for what an earlier one left behind
        start = time.process_time()
        plan = tf.plan(canonical, TARGET, name=model)
        seconds.append(time.process_time() - start)
    return Row(
        model=model,
        operators=plan.operators,
        cleanup_seconds=round(cleanup, 4),
        seconds=round(min(seconds), 4),
        groups=len(plan.groups),
        exact_regions=plan.search.exact,
        bounded_regions=plan.search.bounded,
    )


def failures(rows: dict[str, Row]) -> list[str]:
    """Say which limits are not kept."""
    large, small = rows["diamonds 5000"].seconds, rows["diamonds 2000"].seconds
    out = []
    if large > MAX_SECONDS:
        out.append(f"5,000 operators took {large:.2f} s, over {MAX_SECONDS:g} s")
    if large > MAX_RATIO * small:
        out.append(
            f"5,000 operators took {large / small:.1f} times as long as 2,000, over {MAX_RATIO:g}"
        )
    return out


def main() -> int:
    """Read the command line, print the rows, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if planning is too slow")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each model")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    models: dict[str, Callable[[], tvm.IRModule]] = {
        **{f"diamonds {n}": lambda n=n: diamonds(n) for n in SIZES},
        "resnet-like 50": lambda: resnet_like(50),
    }
    tf.plan(diamonds(3), TARGET)  # loads what is loaded at first use
    rows: dict[str, Row] = {}
    if not args.json:
        print("| model | operators | clean-up s | plan s | ratio | groups | exact | bounded |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    before = None
    for model, make in models.items():
        row = rows[model] = measure(model, make(), args.repeat)
        if not args.json:
            grown = before is not None and model.split()[0] == before.model.split()[0]
            ratio = f"{row.seconds / before.seconds:.2f}" if grown else ""
            print(
                f"| {model} | {row.operators} | {row.cleanup_seconds:.3f} | {row.seconds:.3f} | "
                f"{ratio} | {row.groups} | {row.exact_regions} | {row.bounded_regions} |",
                flush=True,
            )
        before = row
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows.values()], indent=2))
    broken = failures(rows) if args.check else []
    for text in broken:
        print(text, file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
