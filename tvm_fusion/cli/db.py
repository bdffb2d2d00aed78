"""``tvm-fusion db``: what a work dir holds, several made one, records to give away, less of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .output import PIPE_WIDTH, check_output, write_text

if TYPE_CHECKING:
    from ..tuning.trials import Trial
    from ..tuning.work_dir import Place

DirsArgument = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Work dirs, as tvm-fusion tune fills them.")
]


def list_records(
    dirs: DirsArgument,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="How to print the answer.")
    ] = "text",
    models: Annotated[
        bool,
        typer.Option("--models", help="Show what the trials made of the templates' cost models."),
    ] = False,
) -> None:
    """Show each kernel with its trials and its best time.

    Examples
    --------
    tvm-fusion db list work
    tvm-fusion db list work --format json
    tvm-fusion db list work --models
    """
    describe = _models if models else _kernels
    rows = [row for place in _places(dirs) for row in describe(place)]
    if format == "json":
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no cost model was corrected yet" if models else "no trials are on record yet")
    elif models:
        _print_table(_MODEL_COLUMNS, map(_model_cells, rows))
    else:
        _print_table(_KERNEL_COLUMNS, map(_kernel_cells, rows))


_KERNEL_COLUMNS = (
    "arch", "dtype", "TVM", "kernel", "operators", "template", "trials", "right", "best µs", "device",
)  # fmt: skip


def _kernel_cells(row: dict[str, Any]) -> list[str]:
    cells = [str(row[name]) for name in ("arch", "dtype", "tvm", "kernel")]
    cells += [" ".join(row["operators"]), row["template"] or "–", str(row["trials"])]
    best = row["best_us"]
    return [*cells, str(row["right"]), "–" if best is None else f"{best:.2f}", row["device"]]


_MODEL_COLUMNS = (
    "arch", "dtype", "TVM", "device", "template", "kernels", "trials", "rank correlation",
    "corrected", "used",
)  # fmt: skip


def _model_cells(row: dict[str, Any]) -> list[str]:
    cells = [str(row[name]) for name in ("arch", "dtype", "tvm", "device", "template")]
    cells += [str(row["kernels"]), str(row["trials"])]
    return [*cells, f"{row['before']:.2f}", f"{row['after']:.2f}", "yes" if row["used"] else "no"]


def _print_table(columns: tuple[str, ...], rows: Iterable[list[str]]) -> None:
    from ..report.text import plain_table, text_console, tidy

    table = plain_table(columns)
    for cells in rows:
        table.add_row(*cells)
    terminal = sys.stdout.isatty()
    console, buffer = text_console(None if terminal else PIPE_WIDTH, terminal)
    console.print(table)
    print(tidy(buffer))


def report_records(
    dirs: DirsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write, as tuning.html.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this model (default: all).")
    ] = None,
) -> None:
    """Write a page about what was tuned: curves, fusion depths, rejected candidates, results.

    Examples
    --------
    tvm-fusion db report work -o tuning.html
    tvm-fusion db report work --model resnet50 -o tuning.html
    """
    from ..report import render_tuning

    check_output(output, dirs[0])
    places = _places(dirs)
    page = render_tuning(places, model=model)
    write_text(output, page + "\n")
    print(f"wrote {output}")


def merge_records(
    dirs: DirsArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Work dir to add to; made if it is not there.")
    ],
) -> None:
    """Add the records of work dirs to one, without duplicates.

    Examples
    --------
    tvm-fusion db merge machine1 machine2 -o work
    """
    from ..tuning.upkeep import merge
    from ..tuning.work_dir import WorkDir

    trials, records = merge(map(WorkDir, dirs), WorkDir(output))
    print(f"added {trials} trials and {records} records of meta-schedule to {output}")


def export_records(
    dirs: DirsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    arch: Annotated[
        str | None, typer.Option(help="Only this arch, where there are several, as sm_90.")
    ] = None,
) -> None:
    """Write the best trial of each kernel to one small file.

    Examples
    --------
    tvm-fusion db export work -o sm_90.jsonl
    tvm-fusion db export work --arch sm_80 -o sm_80.jsonl
    """
    from ..errors import DatabaseError
    from ..tuning.shipped import export_trials

    check_output(output, dirs[0])
    places = _places(dirs)
    places = [place for place in places if arch in (None, place.arch)]
    archs = sorted({place.arch for place in places})
    if len(archs) > 1:
        raise ValueError(f"there are records of {', '.join(archs)}; choose with --arch")
    text = export_trials(places)
    if not text:
        advice = "leave --arch out" if arch else "tune first, with tvm-fusion tune --work-dir"
        raise DatabaseError(f"no kernel{f' of {arch}' if arch else ''} has a time there; {advice}")
    fresh = output.with_name(f".{output.name}.new")
    try:
        write_text(fresh, text)
        os.replace(fresh, output)
    except OSError as error:  # nobody knows the other name
        raise OSError(error.errno, error.strerror, str(output)) from error
    finally:
        fresh.unlink(missing_ok=True)
    count = len(text.splitlines())
    print(f"wrote {count} kernel{'s' * (count != 1)} to {output}")


def prune_records(
    dirs: DirsArgument,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Trials to keep of each kernel and device.")
    ] = 1,
) -> None:
    """Drop all but the best trials of each kernel.

    Examples
    --------
    tvm-fusion db prune work
    tvm-fusion db prune work --keep 16
    """
    from ..tuning.upkeep import prune

    for place in _places(dirs):
        dropped = prune(place, keep)
        print(f"{place.folder}: dropped {dropped}")


def _places(dirs: list[Path]) -> list[Place]:
    """The folders of records in work dirs, each once."""
    from ..tuning.work_dir import WorkDir

    found = {place.folder.resolve(): place for path in dirs for place in WorkDir(path).places()}
    return list(found.values())


def _models(place: Place) -> Iterator[dict[str, Any]]:
    """Describe each template's cost model as a folder's trials correct it."""
    from ..tuning.corrections import load_models

    where = {"arch": place.arch, "dtype": place.dtype_policy, "tvm": place.tvm}
    for device, models in load_models(place.folder).items():
        for model in models.values():
            yield {**where, "device": device, **model.to_dict()}


def _kernels(place: Place) -> Iterator[dict[str, Any]]:
    """Describe each kernel of a folder."""
    records = place.records()
    for kernel in records.kernels():
        trials: list[Trial] = records.trials(kernel)
        best = records.best(kernel)
        yield {
            "arch": place.arch,
            "dtype": place.dtype_policy,
            "tvm": place.tvm,
            "kernel": kernel,
            "operators": list(next((t.operators for t in trials if t.operators), ())),
            "template": best.template if best else None,
            "decision": dict(best.decision) if best else None,
            "trials": len(trials),
            "right": sum(t.verdict == "ok" for t in trials),
            "best_us": best.microseconds if best else None,
            "device": best.device if best else "",
        }
