"""Check the must targets of tuning within results of ``run.py --tuned``.

    python benchmarks/check_tuning.py rows.json networks.json

Several files are checked together. Exit code 0 if all hold, 1 if any is missed:

- tuned kernels, with the depth that measured best, are slower than untuned or unfused ones nowhere, and faster
  than untuned ones in geometric mean. Slower is what is neither the same code nor within the run's noise: of the
  rounds of a contender, or between processes, which contenders of the same code show (the median of all rows);
- in geometric mean they beat the same kernels at the depth that would be planned without measuring, and
  stock TVM (its FuseOps and meta-schedule) with the same trials, where those were measured;
- whole networks at float16: at least 1.05x the best mode of torch.compile at batch 1, 0.9x at batch 32.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from check import geometric_mean
from results import read_parts
from rows import ROWS

#: Least speed of whole networks against the best mode of torch.compile, by batch.
NETWORK = {1: 1.05, 32: 0.9}


def failures(results: Mapping[str, Any]) -> list[str]:
    """Say which must targets are missed, and by how much."""
    rows = [r for r in results["rows"] if "ours_tuned" in r.get("errors", {}) and r.get("ours_us")]
    out = [f"{name_of(r)}: not tuned" for r in results["rows"] if r not in rows]
    between = noise_between_processes(results["rows"])
    for row in rows:
        out += _never_slower(row, between)
        out += _network(row)
    for what, ratios in gains(rows).items():
        mean = geometric_mean(ratios.values())
        if not mean > 1:  # NaN, of no rows, is no pass
            out.append(f"geometric mean {mean:.3f}x {what}, must be over 1x ({len(ratios)} rows)")
    return out


def name_of(row: Mapping[str, Any]) -> str:
    """Name and dtype of a row."""
    return f"{row['name']} {row['dtype']}"


def gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Speed of the tuned depth against untuned kernels, the deepest plan and tuned stock TVM, by row."""
    out: dict[str, dict[str, float]] = {
        "untuned": {},
        "the deepest plan": {},
        "tuned stock TVM": {},
    }
    for row in rows:
        others = (
            row.get("untuned_us"),
            row.get("extra", {}).get("ours_tuned_deepest"),
            row.get("peers", {}).get("tvm_tuned"),
        )
        for found, other in zip(out.values(), others, strict=True):
            if other:
                found[name_of(row)] = other / row["ours_us"]
    return out


def noise_between_processes(rows: Sequence[Mapping[str, Any]]) -> float:
    """By how much times of the same code in two processes differ (relative, the median of all rows); 0 without any."""
    found = []
    for row in rows:
        times = {
            "ours": row.get("untuned_us"),
            "ours_tuned": row.get("ours_us"),
            **row.get("extra", {}),
        }
        codes = {c: code for c, us in times.items() if us and (code := _code(row, c))}
        found += [
            abs(times[a] / times[b] - 1)
            for a, b in itertools.combinations(codes, 2)
            if codes[a] == codes[b]
        ]
    return statistics.median(found) if found else 0.0


def _code(row: Mapping[str, Any], contender: str) -> str:
    return row.get("about", {}).get(contender, {}).get("code", "")


def _never_slower(row: Mapping[str, Any], between: float) -> Iterator[str]:
    ours, spread = row["ours_us"], row.get("spread", {})
    for what, us in (("untuned", row.get("untuned_us")), ("unfused", row.get("unfused_us"))):
        side = "ours" if what == "untuned" else what
        noise = max(spread.get("ours_tuned", 0.0), spread.get(side, 0.0), between)
        if not us:
            yield f"{name_of(row)}: {what} was not measured"
        elif _code(row, side) and _code(row, side) == _code(row, "ours_tuned"):
            continue
        elif ours > us * (1 + noise):
            yield f"{name_of(row)}: {ours:.2f} us tuned, {us:.2f} {what} (noise of the run {100 * noise:.1f} %)"


def _network(row: Mapping[str, Any]) -> Iterator[str]:
    if not ROWS[row["name"]].network or row["dtype"] != "float16":
        return
    least = NETWORK.get(int(row["name"].rsplit("_b", 1)[1]))
    modes = {k: us for k, us in row.get("peers", {}).items() if k.startswith("inductor")}
    if least is None or row["name"].startswith("bert"):
        return  # attention has an issue of its own
    if not modes:
        yield f"{name_of(row)}: torch.compile was not measured"
        return
    best = min(modes, key=modes.__getitem__)
    if modes[best] / row["ours_us"] < least:
        yield (
            f"{name_of(row)}: {modes[best] / row['ours_us']:.3f}x {best}, must be {least:g}x: "
            f"{row['ours_us']:.1f} us against {modes[best]:.1f}"
        )


def main() -> int:
    """Read the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    results = read_parts(args.results)
    for what, ratios in gains([r for r in results["rows"] if r.get("ours_us")]).items():
        each = ", ".join(f"{row} {ratio:.2f}" for row, ratio in ratios.items())
        print(f"against {what}: geometric mean {geometric_mean(ratios.values()):.3f} ({each})")
    between = noise_between_processes(results["rows"])
    print(f"the same code in two processes: {100 * between:.1f} % apart in the median")
    missed = failures(results)
    for text in missed:
        print(f"FAILED: {text}")
    print(f"{len(missed)} must targets are missed" if missed else "every must target holds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
