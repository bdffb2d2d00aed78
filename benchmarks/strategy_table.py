"""What each strategy adds: launches, bytes and predicted time of whole models.

One Markdown row per model, dtype and set of strategies: none, vertical only, + horizontal, + cross,
+ compound. With ``--times`` (kernels measured by ``kernel_times.py``) each model also gets the rank
correlation of predicted and measured times over its kernels that were measured.

    python benchmarks/strategy_table.py                                   # cuda:sm_90, no GPU needed
    python benchmarks/strategy_table.py bert --dtype float16 --target cuda:sm_80
    python benchmarks/strategy_table.py --times benchmarks/results/kernels-h200.json --json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from kernel_list import kernels_of, load_model, prepare
from kernel_times import read_table, spearman

import tvm_fusion as tf
from tvm_fusion.config import STRATEGIES, FusionConfig
from tvm_fusion.planner.plan import Totals
from tvm_fusion.targets import parse_target

#: ResNet-50 and Inception v1 as the onnx package ships them, MobileNetV2 from torch, a BERT block.
MODELS = ("resnet50", "inception_v1", "mobilenet_v2", "bert")
COLUMNS = ("model", "dtype", "strategies", "groups", "launches", "MiB", "predicted us", "ratio")


def rows_of(name: str, dtype: str, module: tvm.IRModule, target: Any) -> Iterator[dict[str, Any]]:
    """Plan a prepared module with ever more strategies and yield the outcome of each."""
    for count in range(len(STRATEGIES) + 1):
        # The first row counts the same plan before fusion.
        chosen = STRATEGIES[: max(count, 1)]
        plan = tf.plan(module, target, FusionConfig(strategies=chosen), name=name)
        side = "after" if count else "before"
        label = "none" if not count else ("+ " if count > 1 else "") + chosen[-1]
        yield {
            "model": name,
            "dtype": dtype,
            "strategies": label,
            "groups": _by_strategy(plan) if count else {},
            **_totals(plan.totals, side),
            "ratio": round(plan.totals.predicted_us_before / _us(plan.totals, side), 3),
        }


def _by_strategy(plan: tf.Plan) -> dict[str, int]:
    counts = {s: sum(g.strategy == s for g in plan.groups) for s in STRATEGIES}
    return {s: n for s, n in counts.items() if n}


def _us(totals: Totals, side: str) -> float:
    return getattr(totals, f"predicted_us_{side}") or math.nan


def _totals(totals: Totals, side: str) -> dict[str, Any]:
    return {
        "launches": getattr(totals, f"launches_{side}"),
        "mib": round(getattr(totals, f"bytes_{side}") / 2**20, 1),
        "predicted_us": round(_us(totals, side), 1),
    }


def correlation(
    name: str, module: tvm.IRModule, target: Any, times: dict[str, float]
) -> dict[str, Any]:
    """Rank correlation over the model's kernels, fused and not, that ``times`` has by hash."""
    pairs = [
        (kernel.row["predicted_us"], times[kernel.row["hash"]])
        for kernel in {k.row["hash"]: k for k in kernels_of(name, module, target)}.values()
        if kernel.row["hash"] in times
    ]
    value = spearman([p for p, _ in pairs], [m for _, m in pairs])
    return {"spearman": None if math.isnan(value) else round(value, 3), "kernels": len(pairs)}


def as_text(row: dict[str, Any]) -> str:
    """One row as Markdown."""
    groups = ", ".join(f"{n} {s}" for s, n in row["groups"].items())
    cells = [
        row["model"], row["dtype"], row["strategies"], groups, str(row["launches"]), f"{row['mib']:.1f}",
        f"{row['predicted_us']:.1f}", f"{row['ratio']:.2f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--dtype", action="append", help="repeatable; default: float32 and float16")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--times", type=Path, help="kernels measured by kernel_times.py")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    target = parse_target(args.target)
    times: dict[str, float] = {}
    if args.times:
        times = {r["hash"]: r["measured_us"] for r in read_table(args.times)[1] if r["measured_us"]}
    rows, ranks = [], []
    if not args.json:
        print("| " + " | ".join(COLUMNS) + " |")
        print("|" + " --- |" * len(COLUMNS))
    for name in args.models:
        for dtype in args.dtype or ["float32", "float16"]:
            module = prepare(load_model(name, dtype), target)
            for row in rows_of(name, dtype, module, target):
                rows.append(row)
                if not args.json:
                    print(as_text(row), flush=True)
            if times:
                found = correlation(name, module, target, times)
                ranks.append({"model": name, "dtype": dtype, **found})
    if args.json:
        print(json.dumps({"target": args.target, "rows": rows, "correlation": ranks}, indent=1))
        return
    for rank in ranks:
        print(
            f"{rank['model']} {rank['dtype']}: Spearman {rank['spearman']} "
            f"over {rank['kernels']} measured kernels"
        )


if __name__ == "__main__":
    main()
