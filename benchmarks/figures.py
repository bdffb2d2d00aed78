"""The figures that the project set out from: fused against unfused, line by line, and the curve of 2 to 12 members.

    python benchmarks/figures.py --out figures.json                # measure on this GPU, and print
    python benchmarks/figures.py --out figures.json --curve 128    # also the curve, 128×128 maps
    python benchmarks/figures.py --out figures.json --curve 128 --only-curve    # add it to the file
    python benchmarks/figures.py --show figures.json -o figures.md --plot curve.png

Fused and unfused are this project's own kernels, one per group and one per operator; launches, bytes and
FLOPs are those of the plan, every operator and tensor counted. Options that this script does not know go
to ``run.py`` (``--dtypes``, ``--work``, ``--budget``, ``--commit``…). The curve is measured by
``members_curve.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import commit_of, write_results

_CURVE = Path(__file__).with_name("members_curve.py")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: its row, and the figure that was given for it when the project began."""

    case: str
    row: str
    sources: str


LINES = (
    Line("4 parallel 3×3 convolutions, summed", "convsum4",
         "4 launches, 16 MB, 2.3 ms → 1, 4 MB, 1.1 ms (−52 %)"),
    Line("3 parallel convolutions, summed", "convsum3", "6 passes over the map → 2"),
    Line("4 FC + LayerNorm heads", "fcln4", "4 launches of each → 1"),
    Line("Q, K, V projections of 8 heads", "qkv8", "35 % of bandwidth → 78 %"),
    Line("Conv + BN + ReLU on a 4 MB map", "cbr_map", "16 MB → 8 MB"),
    Line("depthwise + pointwise, 112×112, 32→64", "dwpw",
         "2–3 FLOP/B, 20 % utilisation → 15+, 70 %"),
    Line("ResNet-50, batch 1", "resnet50_b1", "merging across the residual branches: −15 %"),
)  # fmt: skip

CONTENDERS = ("unfused", "ours_no_cross", "ours")
_HEADS = ("case", "sources", "launches", "MiB", "µs", "gain", "GB/s", "% of copy rate", "TFLOP/s",
          "FLOP/B", "error")  # fmt: skip


def sides(row: Mapping[str, Any], copy_rate: float | None) -> list[dict[str, float | None]]:
    """Launches, bytes, time and rates of a row, unfused and fused; None where not measured."""
    out = []
    for name, us in (("unfused", row.get("unfused_us")), ("ours", row.get("ours_us"))):
        about = row.get("about", {}).get(name, {})
        moved, flops = about.get("plan_bytes"), about.get("plan_flops")
        rate = moved / us * 1e6 if us and moved else None
        out.append(
            {
                "launches": about.get("launches"),
                "mib": moved / 2**20 if moved else None,
                "us": us,
                "gb_per_s": rate / 1e9 if rate else None,
                "share": 100 * rate / copy_rate if rate and copy_rate else None,
                "tflop_per_s": flops / us / 1e6 if us and flops else None,
                "intensity": flops / moved if flops and moved else None,
            }
        )
    return out


def _pair(values: Sequence[Mapping[str, float | None]], key: str, digits: int) -> str:
    texts = ["–" if v[key] is None else f"{v[key]:.{digits}f}" for v in values]
    return " → ".join(texts)


def markdown(results: Mapping[str, Any]) -> str:
    """The figures, a table for each dtype, and the curve."""
    driver = f", driver {results['driver']}" if results["driver"] else ""
    lines = [
        f"Measured on one {results['device']}{driver}, {results['date']}, commit {results['commit']}.",
        "Each pair is unfused → fused; launches, bytes and FLOPs as the plan counts them.",
    ]
    copy_rate = (results.get("ceilings") or {}).get("copy")
    for dtype in dict.fromkeys(row["dtype"] for row in results["rows"]):
        found = {r["name"]: r for r in results["rows"] if r["dtype"] == dtype}
        lines += ["", f"## {dtype}", "", "| " + " | ".join(_HEADS) + " |"]
        lines.append("|" + " --- |" * len(_HEADS))
        for line in LINES:
            row = found.get(line.row)
            if row is not None:
                lines.append(_as_text(line, row, copy_rate))
        cross = found.get("resnet50_b1", {}).get("extra", {}).get("ours_no_cross")
        ours = found.get("resnet50_b1", {}).get("ours_us")
        if cross and ours:
            change = 100 * (ours / cross - 1)
            text = f"ResNet-50 without cross fusion {cross:.1f} µs, with it {ours:.1f} µs"
            lines += ["", f"{text} ({change:+.1f} %)."]
    if results.get("curve"):
        lines += ["", *curve_table(results["curve"])]
    return "\n".join(lines) + "\n"


def _as_text(line: Line, row: Mapping[str, Any], copy_rate: float | None) -> str:
    both = sides(row, copy_rate)
    before, after = (side["us"] for side in both)
    gain = (
        f"{before / after:.2f}× ({100 * (after / before - 1):+.0f} %)" if before and after else "–"
    )
    error = row.get("error")
    cells = [
        line.case, line.sources, _pair(both, "launches", 0), _pair(both, "mib", 1), _pair(both, "us", 1),
        gain, _pair(both, "gb_per_s", 0), _pair(both, "share", 0), _pair(both, "tflop_per_s", 1),
        _pair(both, "intensity", 1), "–" if error is None else f"{error:.1e}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def curve_table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Measured times of 2 to 12 members: all in one kernel, one kernel a branch, the planner's choice."""
    lines = [
        "## Members in one kernel", "", *_commits(curve),
        "| case | map | dtype | members | one kernel µs | one a branch | one an operator | planned | planner |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    for row in curve:
        times = row["measured_us"]
        order = ("one", "vertical", "unfused", "planned")
        cells = [f"{times[s]:.1f}" if s in times else "–" for s in order]
        head = [row["case"], f"{row['size']}²", row["dtype"], str(row["members"])]
        lines.append("| " + " | ".join([*head, *cells, row["chosen"]]) + " |")
    return lines


def _commits(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which commits the parts of a curve are of that were measured apart from the rows."""
    apart = dict.fromkeys((r["dtype"], r["commit"]) for r in curve if "commit" in r)
    told = ", ".join(f"{dtype} at commit {commit}" for dtype, commit in apart)
    return [f"Measured apart: {told}.", ""] if told else []


def plot(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time a member over the number of members.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If nothing was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve = [row for row in curve if row["measured_us"]]
    if not curve:
        raise ValueError("the curve was not measured")
    panels = list(dict.fromkeys((r["case"], r["size"], r["dtype"]) for r in curve))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    labels = {"one": "one kernel", "vertical": "a kernel per branch", "planned": "planner's choice"}
    for panel, axis in zip(panels, axes[0], strict=True):
        rows = [r for r in curve if (r["case"], r["size"], r["dtype"]) == panel]
        for side, label in labels.items():
            measured = {r["members"]: r["measured_us"] for r in rows}
            points = [(n, us[side] / n) for n, us in measured.items() if side in us]
            if points:
                dashes = "--" if side == "planned" else "-"
                axis.plot(*zip(*points, strict=True), dashes, marker="o", label=label)
        axis.set_title(f"{panel[0]}, {panel[1]}², {panel[2]}", fontsize=10)
        axis.set_xlabel("members")
        axis.set_ylabel("µs per member")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def measure_curve(
    sizes: Sequence[int], dtypes: Sequence[str], target: str, members: Sequence[int]
) -> list[dict[str, Any]]:
    """Run ``members_curve.py`` on the case of one input, summed.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    command = [
        sys.executable,
        str(_CURVE),
        "--json",
        "--target",
        target,
        "--case",
        "one input, summed",
        "--members",
        *map(str, members),
    ]
    for size in sizes:
        command += ["--size", str(size)]
    for dtype in dtypes:
        command += ["--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"members_curve.py ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def main() -> int:
    """Read the command line, measure or show, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("figures.json"), help="results file")
    parser.add_argument("--show", type=Path, help="only print an earlier results file")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file; default: print it")
    parser.add_argument("--plot", type=Path, help="image file for the curve")
    parser.add_argument("--rows", help="lines to measure, by row; default: all")
    parser.add_argument("--dtypes", default="float16,float32")
    parser.add_argument(
        "--curve",
        type=int,
        action="append",
        default=[],
        help="size of the curve's maps; repeatable",
    )
    parser.add_argument("--curve-target", default="cuda")
    parser.add_argument(
        "--curve-members",
        type=int,
        nargs="*",
        default=list(range(2, 13)),
        help="numbers of members",
    )
    parser.add_argument("--only-curve", action="store_true", help="measure no rows")
    args, others = parser.parse_known_args()
    status = 0
    if args.show is None and not args.only_curve:
        from run import main as run

        rows = args.rows or ",".join(line.row for line in LINES)
        wanted = ["--rows", rows, "--dtypes", args.dtypes, "--contenders", ",".join(CONTENDERS)]
        status = run([*wanted, "--out", str(args.out), "--quiet", *others])
    path = args.show or args.out
    results = json.loads(path.read_text())
    if args.curve and args.show is None:
        curve = measure_curve(
            args.curve, args.dtypes.split(","), args.curve_target, args.curve_members
        )
        if args.only_curve:
            commit = commit_of(None)
            old = [r for r in results.get("curve", []) if r["dtype"] not in args.dtypes.split(",")]
            curve = [*old, *({**r, "commit": commit} for r in curve)]
        results["curve"] = curve
        write_results(path, results)
    if args.output:
        picture = f"![Time per member]({args.plot.name})\n\n" if args.plot else ""
        args.output.write_text(picture + markdown(results))
    else:
        print(markdown(results))
    if args.plot:
        plot(results.get("curve", []), args.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
