"""Results as Markdown tables and a plot.

python benchmarks/table.py results.json                                # prints the tables
python benchmarks/table.py results.json --compact                      # only those of the README
python benchmarks/table.py results.json -o results.md --plot results.png
python benchmarks/table.py a.json b.json --publish benchmarks/results/h200-rows   # .json, .md and .png

Several files of one device and commit (a run in parts) are one table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from check import TARGET_ROWS, best_peer, geometric_mean
from results import read_parts, write_results

_HEADS = (
    "row", "ours µs", "best automatic peer µs", "×", "expert µs", "×", "unfused µs", "×", "floor µs", "time / floor",
)  # fmt: skip
_DETAILS = ("row", "what", "launches", "unfused", "GB/s", "TFLOP/s", "error", "noise")

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
    """The columns of the targets, with geometric means of the rows that have targets below."""
    lines = [_line(_HEADS), "|" + " --- |" + " ---: |" * (len(_HEADS) - 1)]
    for row in rows:
        found, best = ratios(row), best_peer(row)
        lines.append(_line([
            row["name"], _number(row.get("ours_us")), f"{best[1]:.1f} ({best[0]})" if best else "–",
            _number(found.get("peer"), 2), _number(row.get("expert_us")), _number(found.get("expert"), 2),
            _number(row.get("unfused_us")), _number(found.get("unfused"), 2),
            _number(row.get("floor_us")), _number(found.get("floor"), 2),
        ]))  # fmt: skip
    each = [ratios(r) for r in rows if r["name"] in TARGET_ROWS]
    if not each:
        return lines
    cells = [f"geometric mean of the {len(each)} rows without attention", ""]
    for key in ("peer", "expert", "unfused", "floor"):
        values = [e[key] for e in each if key in e]
        cells += ["", f"**{geometric_mean(values):.2f}**" if values else "–"]
    return [*lines, _line(cells)]


def details_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each row is, launches, and what we reach: rates of the least bytes and FLOPs, error, noise."""
    lines = [_line(_DETAILS), "|" + " --- |" * 2 + " ---: |" * (len(_DETAILS) - 2)]
    for row in rows:
        about, error = row.get("about", {}), row.get("error")
        noise = row.get("spread", {}).get("ours")
        lines.append(_line([
            row["name"], row.get("title", ""),
            *(str(about.get(side, {}).get("launches", "–")) for side in ("ours", "unfused")),
            _number(row.get("gb_per_s"), 0), _number(row.get("tflop_per_s")),
            "–" if error is None else f"{error:.1e}", "–" if noise is None else f"{100 * noise:.1f} %",
        ]))  # fmt: skip
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


def compact(results: Mapping[str, Any]) -> str:
    """The tables of the targets alone, for a README."""
    lines: list[str] = []
    for dtype in dict.fromkeys(row["dtype"] for row in results["rows"]):
        rows = [r for r in results["rows"] if r["dtype"] == dtype]
        lines += [f"**{dtype}**", "", *main_table(rows), ""]
    return "\n".join(lines)


def markdown(results: Mapping[str, Any]) -> str:
    """The whole page."""
    versions = ", ".join(f"{k} {v}" for k, v in sorted(results["versions"].items()))
    driver = f", driver {results['driver']}" if results["driver"] else ""
    lines = [
        f"Measured on one {results['device']}{driver}, {results['date']}, commit {results['commit']}; {versions}.",
        "",
        "µs per call, warm (one CUDA graph of 20 copies); × is their time over ours."
        if results["driver"]
        else "No GPU: plain calls on a CPU, which says nothing about the targets.",
    ]
    dtypes = dict.fromkeys(row["dtype"] for row in results["rows"])
    for dtype in dtypes:
        rows = [r for r in results["rows"] if r["dtype"] == dtype]
        lines += ["", f"## {dtype}", "", *main_table(rows), "", *details_table(rows)]
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
    """Draw the times of each row as bars on a logarithmic axis, the floor as a line across them.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If the file has no row of the dtype with our time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results["rows"] if r["dtype"] == dtype and r.get("ours_us")]
    if not rows:
        raise ValueError(f"no {dtype} row with a time to draw")
    series = {
        "our kernels, unfused": [r.get("unfused_us") for r in rows],
        "best automatic peer": [best[1] if (best := best_peer(r)) else None for r in rows],
        "hand-merged PyTorch (expert)": [r.get("expert_us") for r in rows],
        "tvm_fusion": [r["ours_us"] for r in rows],
    }
    colours = ("#d0d0d0", "#f2a541", "#7a9cc6", "#1b6b52")
    figure, axes = pyplot.subplots(
        figsize=(max(7.0, 1.6 + 0.85 * len(rows)), 4.4), layout="constrained"
    )
    width = 0.2
    for i, ((label, times), colour) in enumerate(zip(series.items(), colours, strict=True)):
        drawn = [(p + (i - 1.5) * width, us) for p, us in enumerate(times) if us]
        if drawn:
            axes.bar(*zip(*drawn, strict=True), width, label=label, color=colour)
    floors = [(p, r["floor_us"]) for p, r in enumerate(rows) if r.get("floor_us")]
    if floors:
        places, us = zip(*floors, strict=True)
        left, right = ([p + side * 2.2 * width for p in places] for side in (-1, 1))
        axes.hlines(us, left, right, color="black", linewidth=1.4, label="physical floor")
    for place, row in enumerate(rows):
        ratio = ratios(row).get("peer")
        if ratio:  # over the bar of the best peer
            axes.annotate(
                f"{ratio:.1f}×", (place - 0.5 * width, best_peer(row)[1]), (0, 2), fontsize=7,
                textcoords="offset points", ha="center",
            )  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [d * 10**e for e in range(-1, 7) for d in (1, 2, 5) if low <= d * 10**e <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_xticks(range(len(rows)), [r["name"] for r in rows], rotation=30, ha="right")
    axes.set_ylabel("µs, warm, log scale (lower is better)")
    axes.set_title(f"{dtype}, one {results['device']}, commit {results['commit']}", fontsize=10)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.06))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def publish(results: Mapping[str, Any], stem: Path, dtype: str) -> None:
    """Write ``stem`` with .json, .md and .png.

    Raises
    ------
    ImportError, ValueError
        As `plot`.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    plot(results, stem.with_name(stem.name + ".png"), dtype)
    write_results(stem.with_name(stem.name + ".json"), results)
    picture = f"![Times of each row]({stem.name}.png)\n\n"
    stem.with_name(stem.name + ".md").write_text(picture + markdown(results))


def main() -> None:
    """Read the command line, write the tables and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file; default: print it")
    parser.add_argument("--compact", action="store_true", help="only the tables of the targets")
    parser.add_argument("--plot", type=Path, help="image file (png or svg)")
    parser.add_argument("--publish", type=Path, help="FOLDER/NAME: write NAME.json, .md and .png")
    parser.add_argument("--dtype", default="float16", help="dtype of the plot")
    args = parser.parse_args()
    try:
        results = read_parts(args.results)
    except ValueError as error:
        parser.error(str(error))
    text = compact(results) if args.compact else markdown(results)
    if args.output:
        args.output.write_text(text)
    elif not args.publish:
        print(text)
    if args.plot:
        plot(results, args.plot, args.dtype)
    if args.publish:
        publish(results, args.publish, args.dtype)


if __name__ == "__main__":
    main()
