"""Fit the constants of the cost model (``planner/cost.py``) to measured kernels, and report its accuracy.

    python benchmarks/fit_cost.py                              # the tables in benchmarks/results
    python benchmarks/fit_cost.py times.json [more.json ...]   # written by kernel_times.py

For each kind of kernel the share of the peak and the time of one step of a sum are searched on a
grid for the least mean logarithmic error over the kernels of one anchor; the saturation is one
number for all. The fit is printed and nothing is changed: constants are edited by hand, with the
tables that they rest on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernel_times import read_table, spearman

from tvm_fusion.devices import DEVICES, DeviceSpec
from tvm_fusion.guards.needs import Footprint
from tvm_fusion.planner.cost import GPU_RATES, Rates, kernel_seconds

RESULTS = Path(__file__).resolve().parent / "results"
SHARES = (0.03, 0.04, 0.06, 0.08, 0.12, 0.18, 0.24, 0.3, 0.4, 0.5)
STEPS = (0.0, 4e-9, 8e-9, 12e-9, 16e-9, 20e-9, 25e-9)
SATURATIONS = (6_000, 12_000, 24_000, 48_000)


def seconds(row: dict[str, Any], rates: Rates, device: DeviceSpec) -> float:
    """Predicted time of a kernel of one anchor with other constants."""
    sums = row["kind"] != "pointwise" and row["out"]
    depth = row["flops"] // (2 * row["out"]) if sums else 0
    needs = Footprint(
        row["threads"],
        row["grid"],
        0,
        0,
        row["flops"],
        outputs=row["out"] if sums else 0,
        depth=depth,
    )
    return kernel_seconds(needs, row["bytes"], row["kind"], row["dtype"], "", 1, device, rates)


def error(rows: Sequence[dict[str, Any]], rates: Rates, device: DeviceSpec) -> float:
    """Mean absolute logarithm of measured over predicted time."""
    logs = [math.log(r["measured_us"] / (1e6 * seconds(r, rates, device))) for r in rows]
    return float(np.abs(logs).mean())


def fit(rows: Sequence[dict[str, Any]], device: DeviceSpec) -> None:
    """Print the best constants of each kind beside those in use."""
    for kind in sorted({r["kind"] for r in rows}):
        some = [r for r in rows if r["kind"] == kind]
        best = min(
            (
                (error(some, rates, device), share, step, saturation)
                for share, step, saturation in itertools.product(SHARES, STEPS, SATURATIONS)
                for rates in [_with(kind, share, step, saturation)]
            ),
            default=None,
        )
        now = error(some, GPU_RATES, device)
        print(
            f"{kind:12} {len(some):5} kernels  error {now:.3f} in use, {best[0]:.3f} at share {best[1]}, "
            f"step {best[2] * 1e9:.0f} ns, saturation {best[3]}"
        )


def _with(kind: str, share: float, step: float, saturation: int) -> Rates:
    return dataclasses.replace(
        GPU_RATES,
        compute={**GPU_RATES.compute, kind: share},
        step={**GPU_RATES.step, kind: step},
        saturation=saturation,
    )


def main() -> None:
    """Read the tables, fit, and print the accuracy of the predictions in them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "tables", nargs="*", type=Path, default=sorted(RESULTS.glob("kernels-*.json"))
    )
    parser.add_argument("--arch", default="sm_90", help="device table entry of the measured GPU")
    options = parser.parse_args()
    device = DEVICES[options.arch]
    for path in options.tables:
        meta, rows = read_table(path)
        rows = [r for r in rows if r["measured_us"]]
        print(f"{path.name}: {len(rows)} kernels, predicted by the model of {meta['commit']}")
        for strategy in sorted({r["strategy"] for r in rows}):
            some = [r for r in rows if r["strategy"] == strategy]
            predicted = [r["predicted_us"] for r in some]
            measured = [r["measured_us"] for r in some]
            ratio = np.median(np.divide(measured, predicted))
            print(
                f"  {strategy:10} {len(some):5} kernels  Spearman {spearman(predicted, measured):.3f}  "
                f"measured / predicted {ratio:.2f} (median)"
            )
        fit([r for r in rows if not r["form"] and r["anchors"] <= 1], device)


if __name__ == "__main__":
    main()
