"""Check the must targets within the results of one run.

    python benchmarks/check.py results.json
    python benchmarks/check.py float16.json float32.json       # a run in parts

Exit code 0 if all hold, 1 if any is missed. A row that was not measured, or whose result is wrong,
misses its targets. Noise is printed beside a miss, and does not excuse it. Aims that are missed, and rows
without targets that are slower than our own unfused plan, are printed too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import read_parts
from rows import ROWS

#: Rows that the targets hold for: the ten without attention.
TARGET_ROWS = tuple(name for name, row in ROWS.items() if row.target)

#: At float16: least speed against every automatic peer, their best (geometric mean), the expert on
#: each row and in geometric mean.
EACH_PEER, MEAN_PEER = 1.05, 1.8
EACH_EXPERT, MEAN_EXPERT = 0.95, 1.2
#: At float32: least speed against every automatic peer.
EACH_PEER_FLOAT32 = 1.0
#: Largest time of ``gelu_ln`` at float16, in microseconds, on an H200.
GELU_LN_US = 80.0
#: Aims at float16: most times the floor, best peers' geometric mean, ``gelu_ln`` in microseconds.
AIM_FLOOR, AIM_MEAN_PEER, AIM_GELU_LN_US = 2.5, 2.5, 62.0


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def best_peer(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest automatic peer of a row."""
    peers = row.get("peers") or {}
    name = min(peers, key=peers.get, default=None)
    return None if name is None else (name, peers[name])


def failures(results: Mapping[str, Any]) -> list[str]:
    """Say which must targets are missed, and by how much."""
    found = {(r["name"], r["dtype"]): r for r in results["rows"]}
    out: list[str] = []
    for dtype in ("float16", "float32"):
        rows = []
        for name in TARGET_ROWS:
            row = found.get((name, dtype))
            if row is None:
                out.append(f"{name} {dtype}: not measured")
            elif not row.get("ours_us"):
                why = row.get("missing", {}).get("ours", "no time")
                out.append(f"{name} {dtype}: ours is missing: {why}")
            else:
                rows.append(row)
        least = EACH_PEER if dtype == "float16" else EACH_PEER_FLOAT32
        for row in rows:
            out += _against_peers(row, least)
            out += _against_unfused(row)
        if dtype == "float16":
            out += _float16_only(rows, str(results.get("device", "")))
    return out


def _noise(row: Mapping[str, Any], *names: str) -> str:
    spread = row.get("spread", {})
    largest = max((spread.get(n, 0.0) for n in ("ours", *names)), default=0.0)
    return f"(noise of the run {100 * largest:.1f} %)"


def _against_peers(row: Mapping[str, Any], least: float) -> Iterator[str]:
    where, ours = f"{row['name']} {row['dtype']}", row["ours_us"]
    if not row.get("peers"):
        yield f"{where}: no automatic peer was measured"
    for name, us in sorted((row.get("peers") or {}).items(), key=lambda item: item[1]):
        if us / ours < least:
            yield (
                f"{where}: {us / ours:.3f}x {name}, must be {least:g}x: {ours:.2f} us against {us:.2f} "
                f"{_noise(row, name)}"
            )


def _against_unfused(row: Mapping[str, Any]) -> Iterator[str]:
    where, ours, unfused = f"{row['name']} {row['dtype']}", row["ours_us"], row.get("unfused_us")
    if not unfused:
        yield f"{where}: our own unfused plan was not measured"
    elif ours > unfused:
        yield (
            f"{where}: slower than our own unfused plan: {ours:.2f} us against {unfused:.2f} "
            f"{_noise(row, 'unfused')}"
        )


def _float16_only(rows: Sequence[Mapping[str, Any]], device: str) -> Iterator[str]:
    for row in rows:
        where, ours, expert = f"{row['name']} float16", row["ours_us"], row.get("expert_us")
        if not expert:
            yield f"{where}: the expert's version was not measured"
        elif expert / ours < EACH_EXPERT:
            yield (
                f"{where}: {expert / ours:.3f}x the expert, must be {EACH_EXPERT:g}x: {ours:.2f} us "
                f"against {expert:.2f} {_noise(row, *row.get('experts', ()))}"
            )
        if row["name"] == "gelu_ln" and "H200" in device and ours > GELU_LN_US:
            yield f"{where}: {ours:.1f} us, must be at most {GELU_LN_US:g}"
    peers = [best[1] / r["ours_us"] for r in rows if (best := best_peer(r))]
    experts = [r["expert_us"] / r["ours_us"] for r in rows if r.get("expert_us")]
    for what, ratios, least in (
        ("the best automatic peer", peers, MEAN_PEER),
        ("the expert", experts, MEAN_EXPERT),
    ):
        mean = geometric_mean(ratios)
        if not mean >= least:  # NaN, of no rows, is no pass
            yield f"float16: geometric mean {mean:.3f}x {what}, must be {least:g}x"


def notes(results: Mapping[str, Any]) -> list[str]:
    """Say which aims are missed, and which rows without targets are slower than our unfused plan."""
    out: list[str] = []
    measured = [r for r in results["rows"] if r.get("ours_us")]
    for row in measured:
        if row["name"] not in TARGET_ROWS and row.get("unfused_us"):
            out += _against_unfused(row)
    rows = [r for r in measured if r["dtype"] == "float16" and r["name"] in TARGET_ROWS]
    for row in rows:
        where, ours, expert = f"{row['name']} float16", row["ours_us"], row.get("expert_us")
        if row.get("floor_us") and ours / row["floor_us"] > AIM_FLOOR:
            out.append(f"{where}: {ours / row['floor_us']:.2f}x the floor, aim {AIM_FLOOR:g}x")
        if expert and ours > expert:
            out.append(f"{where}: {expert / ours:.3f}x the expert, aim 1x")
        if row["name"] == "gelu_ln" and ours > AIM_GELU_LN_US:
            out.append(f"{where}: {ours:.1f} us, aim {AIM_GELU_LN_US:g}")
    mean = geometric_mean(best[1] / r["ours_us"] for r in rows if (best := best_peer(r)))
    if mean < AIM_MEAN_PEER:
        out.append(f"float16: geometric mean {mean:.3f}x the best peer, aim {AIM_MEAN_PEER:g}x")
    return out


def report(results: Mapping[str, Any]) -> list[str]:
    """Print which targets are missed, and which peers are; return the former."""
    for row in results["rows"]:
        for name, why in sorted(row.get("missing", {}).items()):
            print(f"missing: {row['name']} {row['dtype']} {name}: {why}")
    for text in notes(results):
        print(f"note: {text}")
    missed = failures(results)
    for text in missed:
        print(f"FAILED: {text}")
    print(f"{len(missed)} must targets are missed" if missed else "every must target holds")
    return missed


def main() -> int:
    """Read the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    results = read_parts(args.results)
    return int(bool(report(results)))


if __name__ == "__main__":
    sys.exit(main())
