"""What fusion does to whole networks: launches, bytes, error, compile time, fused against unfused.

Prints one Markdown row per network. The networks are the real architectures that the onnx package
ships, with seeded random weights.

    python benchmarks/model_table.py                       # all nine, on the CPU
    python benchmarks/model_table.py resnet50 --target cuda --dtype float16
"""

from __future__ import annotations

import argparse
import time

import tvm_fusion as tf
from tvm_fusion.build.bench import compare
from tvm_fusion.frontend import onnx as onnx_frontend
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.models import LIGHT_MODELS, light_model

COLUMNS = (
    "model", "operators", "groups", "launches", "MiB moved", "error", "compile s", "fused ms", "unfused ms", "ratio",
)  # fmt: skip


def row(name: str, target: str, dtype: str | None, repeat: int) -> list[str]:
    """Plan, compile, verify and time one network."""
    module = onnx_frontend.load(light_model(name), dtype=dtype)
    plan = tf.plan(module, target, name=name)
    start = time.perf_counter()
    tf.compile(module, target, plan=plan, verify=False)
    seconds = time.perf_counter() - start
    report = tf.verify(module, target, plan=plan, inputs=1)
    times = compare(module, parse_target(target), plan, repeat=repeat)
    t = plan.totals
    worst = max(c.error for c in report.comparisons)
    return [
        name, str(plan.operators), str(len(plan.groups)), f"{t.launches_before} → {t.launches_after}",
        f"{t.bytes_before / 2**20:.1f} → {t.bytes_after / 2**20:.1f}",
        f"{worst:.1e}" + ("" if report.passed else " FAILED"), f"{seconds:.1f}",
        f"{times.fused * 1e3:.2f}", f"{times.unfused * 1e3:.2f}", f"{times.ratio:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(LIGHT_MODELS), help="default: all nine")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each side")
    args = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS))
    for name in args.models:
        print("| " + " | ".join(row(name, args.target, args.dtype, args.repeat)) + " |", flush=True)


if __name__ == "__main__":
    main()
