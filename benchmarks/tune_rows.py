"""Tunes rows of the benchmark into a work dir, which ``run.py --tuned DIR`` measures.

    python benchmarks/tune_rows.py tuned --rows cbr1,dwpw --dtypes float16 --minutes 3

Prints a line a row, and writes them to ``DIR/rows.json``: seconds, trials, and microseconds of the whole row tuned,
unfused, untuned and by TVM's default pipeline. Rows that are there already go on where they were.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch_rows
from rows import BLOCKS, NETWORKS, ROWS

if TYPE_CHECKING:
    from tvm_fusion.tuning.workbench import Workbench

DTYPES = ("float16", "float32")


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("work_dir", type=Path, help="where trials are kept")
    p.add_argument("--rows", default=",".join(BLOCKS), help="comma-separated; default: all blocks")
    p.add_argument("--networks", action="store_true", help=f"also {', '.join(NETWORKS)}")
    p.add_argument("--dtypes", default="float16")
    p.add_argument("--trials", type=int, default=1000, help="candidates over all kernels of a row")
    p.add_argument("--minutes", type=float, default=3.0, help="for each row at most")
    p.add_argument("--devices", help="GPUs that measure, as 0,1; default: GPU 0")
    p.add_argument("--target", help="default: cuda where there is a GPU, else llvm")
    return p


def module_of(row: str, dtype: str, folder: Path) -> Any:
    """The row's canonical module; importing runs in a process that has PyTorch and TVM."""
    import torch

    from tvm_fusion import frontend

    path = folder / f"{row}-{dtype}.pt2"
    torch.export.save(torch_rows.exported(torch_rows.build(row, dtype)), path)
    return frontend.load(path, dtype=dtype)


def tune_row(
    row: str, dtype: str, args: argparse.Namespace, folder: Path, bench: Workbench
) -> dict[str, Any]:
    """Tune one row and say how it went; seconds are those of the row's own work, from its canonical module on."""
    from tvm_fusion.targets import parse_target
    from tvm_fusion.tuning.tune import tune_model

    module, target = module_of(row, dtype, folder), parse_target(args.target)
    started = time.monotonic()
    found = tune_model(
        module, target, args.work_dir, trials=args.trials, minutes=args.minutes, name=row,
        workbench=bench,
    )  # fmt: skip
    seconds = round(time.monotonic() - started, 1)
    whole = dataclasses.asdict(found.whole) if found.whole else {}
    groups = [list(group.operators) for group in found.plan.groups]
    return {
        "name": row, "dtype": dtype, "seconds": seconds, "trials": found.trials,
        "shipped": found.shipped, "groups": groups,
        **{key: round(us, 3) if us is not None else None for key, us in whole.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, and return the exit status: 1 if a row failed."""
    command = parser()
    args = command.parse_args(arguments)
    rows = args.rows.split(",") + (list(NETWORKS) if args.networks else [])
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        command.error(f"unknown rows {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    if args.target is None:
        import tvm

        args.target = "cuda" if tvm.cuda(0).exist else "llvm"
    with tempfile.TemporaryDirectory() as folder, workbench(args) as bench:
        return tune_rows(rows, args, Path(folder), bench)


def workbench(args: argparse.Namespace) -> Workbench:
    """Processes that build and measure, the same for all rows."""
    from tvm_fusion.targets import parse_target
    from tvm_fusion.tuning.workbench import Workbench

    devices = [int(word) for word in args.devices.split(",")] if args.devices else None
    return Workbench(parse_target(args.target), devices=devices)


def tune_rows(rows: Sequence[str], args: argparse.Namespace, folder: Path, bench: Workbench) -> int:
    """Tune rows one after another; 1 if one failed."""
    failed = False
    args.work_dir.mkdir(parents=True, exist_ok=True)
    notes = args.work_dir / "rows.json"
    known = (
        {(r["name"], r["dtype"]): r for r in json.loads(notes.read_text())}
        if notes.exists()
        else {}
    )
    for dtype in args.dtypes.split(","):
        for row in rows:
            try:
                line = tune_row(row, dtype, args, folder, bench)
            except Exception as error:  # noqa: BLE001 - the other rows go on
                line = {"name": row, "dtype": dtype, "error": str(error).splitlines()[-1:]}
                failed = True
            known[row, dtype] = line
            print(json.dumps(line), flush=True)
            notes.write_text(json.dumps(list(known.values()), indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
