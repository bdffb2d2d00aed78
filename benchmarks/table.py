"""Results as a Markdown table and a plot.

python benchmarks/table.py results.json                             # prints the table
python benchmarks/table.py results.json -o results.md --plot results.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from check import TARGET_ROWS, best_peer, geometric_mean

_HEADS = (
    "row", "ours µs", "unfused µs", "best automatic peer µs", "expert µs", "floor µs", "× peer", "× expert",
    "× unfused", "× floor", "GB/s", "TFLOP/s", "error",
)  # fmt: skip

_CLOCKS = (
    ("", "Warm"),
    ("cold_", "Cold (caches overwritten; with a replay's overhead)"),
    ("call_", "Calls without a graph"),
)


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Speed against the best peer, the expert and unfused; time against the floor."""
    ours, out = row.get("ours_us"), {}
    if not ours:
        return out
    best = best_peer(row)
    if best:
        out["peer"] = best[1] / ours
    for key, name in (("expert_us", "expert"), ("unfused_us", "unfused")):
        if row.get(key):
            out[name] = row[key] / ours
    if row.get("floor_us"):
        out["floor"] = ours / row["floor_us"]
    return out


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of the targets, with geometric means below."""
    lines = [_line(_HEADS), "|" + " --- |" + " ---: |" * (len(_HEADS) - 1)]
    for row in rows:
        found, best = ratios(row), best_peer(row)
        peer = f"{best[1]:.1f} ({best[0]})" if best else "–"
        error = row.get("error")
        lines.append(_line([
            row["name"], _number(row.get("ours_us")), _number(row.get("unfused_us")), peer,
            _number(row.get("expert_us")), _number(row.get("floor_us")),
            *(_number(found.get(k), 2) for k in ("peer", "expert", "unfused", "floor")),
            _number(row.get("gb_per_s"), 0), _number(row.get("tflop_per_s")),
            "–" if error is None else f"{error:.1e}",
        ]))  # fmt: skip
    for label, some in (
        ("geometric mean, rows without attention", [r for r in rows if r["name"] in TARGET_ROWS]),
        ("geometric mean, all", rows),
    ):
        each = [ratios(r) for r in some]
        means = []
        for key in ("peer", "expert", "unfused", "floor"):
            values = [e[key] for e in each if key in e]
            means.append(f"**{geometric_mean(values):.2f}**" if values else "–")
        lines.append(_line([label, "", "", "", "", "", *means, "", "", ""]))
    return lines


def full_table(rows: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    """Every contender's time by one clock (``prefix`` as in the results: none, ``cold_``, ``call_``)."""
    names = [n for n in _contenders(rows) if n not in ("ours", "unfused")]
    lines = [
        _line(["row", "ours", "unfused", *names]),
        "|" + " --- |" + " ---: |" * (len(names) + 2),
    ]
    for row in rows:
        times = {**row[f"{prefix}peers"], **row[f"{prefix}experts"]}
        cells = [row["name"], _number(row[f"{prefix}ours_us"]), _number(row[f"{prefix}unfused_us"])]
        lines.append(_line([*cells, *(_number(times.get(n)) for n in names)]))
    return lines


def _contenders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found: dict[str, None] = {}
    for row in rows:
        for kind in ("peers", "experts"):
            found.update(dict.fromkeys(row[kind]))
    return list(found)


def missing_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has no time, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row.get("missing", {}).items():
            reasons.setdefault((name, why), []).append(row["name"])
    return [
        f"- {name}: {why} ({', '.join(where) if len(where) < len(rows) else 'every row'})"
        for (name, why), where in sorted(reasons.items())
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """The whole page."""
    versions = ", ".join(f"{k} {v}" for k, v in sorted(results["versions"].items()))
    driver = f", driver {results['driver']}" if results["driver"] else ""
    lines = [
        f"Measured on one {results['device']}{driver}, {results['date']}, commit {results['commit']}; {versions}.",
        "",
        "µs per call, warm (one CUDA graph of 20 copies)."
        if results["driver"]
        else "No GPU: plain calls on a CPU, which says nothing about the targets.",
    ]
    dtypes = dict.fromkeys(row["dtype"] for row in results["rows"])
    for dtype in dtypes:
        rows = [r for r in results["rows"] if r["dtype"] == dtype]
        lines += ["", f"## {dtype}", "", *main_table(rows)]
        for prefix, title in _CLOCKS:
            if any(row[f"{prefix}ours_us"] or row[f"{prefix}peers"] for row in rows):
                lines += ["", f"### {dtype}: {title}, µs", "", *full_table(rows, prefix)]
        missing = missing_table(rows)
        if missing:
            lines += ["", f"### {dtype}: without a time", "", *missing]
    empty = results["empty_kernel_us"]
    if empty:
        times = ", ".join(f"{n} {us:.2f}" for n, us in empty.items())
        lines += ["", f"An almost empty kernel, warm, µs: {times}."]
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Any], path: Path, dtype: str = "float16") -> None:
    """Draw times over the floor: ours, unfused, the best automatic peer and the expert.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If the file has no row of the dtype with a floor.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results["rows"] if r["dtype"] == dtype and r.get("floor_us")]
    if not rows:
        raise ValueError(f"no {dtype} row with a floor to draw")
    series = {
        "unfused": [r.get("unfused_us") for r in rows],
        "best automatic peer": [best[1] if (best := best_peer(r)) else None for r in rows],
        "expert": [r.get("expert_us") for r in rows],
        "tvm_fusion": [r.get("ours_us") for r in rows],
    }
    colours = ("#c8c8c8", "#f2a541", "#7a9cc6", "#1b6b52")
    figure, axes = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
    width = 0.2
    for i, ((label, times), colour) in enumerate(zip(series.items(), colours, strict=True)):
        places = [p + (i - 1.5) * width for p in range(len(rows))]
        over = [0 if us is None else us / r["floor_us"] for us, r in zip(times, rows, strict=True)]
        axes.bar(places, over, width, label=label, color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(rows)), [r["name"] for r in rows], rotation=30, ha="right")
    axes.set_ylabel("time over the physical floor")
    axes.set_title(
        f"{dtype}, one {results['device']}, commit {results['commit']} (lower is better)"
    )
    axes.legend(frameon=False, ncols=4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Read the command line, write the table and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file; default: print it")
    parser.add_argument("--plot", type=Path, help="image file (png or svg)")
    parser.add_argument("--dtype", default="float16", help="dtype of the plot")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    text = markdown(results)
    if args.output:
        args.output.write_text(text)
    else:
        print(text)
    if args.plot:
        plot(results, args.plot, args.dtype)


if __name__ == "__main__":
    main()
