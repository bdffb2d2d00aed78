"""Import networks of torchvision, timm and transformers; compile them for the CPU and compare with PyTorch.

    python benchmarks/torch_import.py --output rows.jsonl [--only timm/ swin] [--all] [--stop-after import|plan]
    python benchmarks/torch_import.py --output rows.jsonl --table        # the rows by family, as docs/torch.md has them

One line of JSON a network: operators, groups, the refusal if there is one, and the largest difference from PyTorch,
relative to the largest value of the output. Networks that the file holds already are skipped. Each runs in a process
of its own. Weights are random, so nothing is downloaded; each network's package must be installed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tvm_fusion as tf
from tvm_fusion.errors import FusionError
from tvm_fusion.testing.torch_zoo import ZOO, ZooModel, smallest_of_each_family

#: Largest difference of a right result. A network whose float32 result in PyTorch differs by more from its own float64
#: result is "unsteady": neither right nor wrong can be told.
MOST = 1e-3


def measure(model: ZooModel, stop_after: str) -> dict[str, Any]:
    """Return one row of the table."""
    net, inputs = model.make()
    with torch.no_grad():
        try:
            program = torch.export.export(net, inputs)
            wanted = net(*inputs)
        except (RuntimeError, ValueError, AssertionError) as error:
            return {"status": "not exported", "detail": str(error).splitlines()[0]}
    row: dict[str, Any] = {}
    try:
        module = tf.frontend.torch.load(program)
        row["operators"] = len(module["main"].body.blocks[0].bindings)
        if stop_after == "import":
            return {"status": "imported", **row}
        plan = tf.plan(module, "llvm")
        row |= {"groups": len(plan.groups), "kernels": plan.totals.launches_after}
        if stop_after == "plan":
            return {"status": "planned", **row}
        got = tf.compile(module, "llvm", plan=plan, verify=False, strict=True)(
            *(tensor.numpy() for tensor in inputs)
        )
    except FusionError as error:
        return {"status": "refused", "detail": str(error).splitlines()[0], **row}
    except Exception as error:  # noqa: BLE001  a table shows what happens, the worst included
        return {"status": "crashed", "detail": f"{type(error).__name__}: {error}"[:500], **row}
    row["error"] = difference(got, wanted)
    if row["error"] <= MOST:
        return {"status": "right", **row}
    row["torch_error"] = difference(numpy_of(wanted), in_float64(net, inputs))
    return {"status": "unsteady" if row["torch_error"] > MOST else "wrong", **row}


def in_float64(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Results of PyTorch in float64; the network stays so."""
    with torch.no_grad():
        return net.double()(*(x.double() if x.is_floating_point() else x for x in inputs))


def numpy_of(wanted: Any) -> list[np.ndarray]:
    """PyTorch's results as arrays."""
    return [x.numpy() for x in (wanted if isinstance(wanted, tuple | list) else [wanted])]


def difference(got: Any, wanted: Any) -> float:
    """Largest difference of any output, relative to the largest value of that output."""
    outputs = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    results = list(got) if isinstance(got, tuple | list) else [got]
    if len(outputs) != len(results):
        return float("inf")
    worst = 0.0
    for result, output in zip(results, outputs, strict=True):
        reference = output.detach().numpy().astype("float64")
        if result.shape != reference.shape or not np.isfinite(result).all():
            return float("inf")
        scale = max(float(np.abs(reference).max(initial=0)), 1e-30)
        worst = max(worst, float(np.abs(result - reference).max(initial=0)) / scale)
    return worst


def one_row(key: str, stop_after: str) -> dict[str, Any]:
    """Measure one network in this process: its row, with seconds by the clock and of the processor, and memory."""
    start, used = time.perf_counter(), time.process_time()
    row = {"model": key, **measure(ZOO[key], stop_after)}
    row["seconds"] = round(time.perf_counter() - start, 1)
    row["cpu_seconds"] = round(time.process_time() - used, 1)
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def row_of_child(key: str, stop_after: str) -> dict[str, Any]:
    """Measure one network in a process of its own, which may crash or need much memory."""
    command = [sys.executable, __file__, "--one", key, "--stop-after", stop_after]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        detail = (done.stderr.strip().splitlines() or [""])[-1]
        return {"model": key, "status": "crashed", "detail": f"exit {done.returncode}: {detail}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows by package and family as a Markdown table."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        model = ZOO[row["model"]]
        families.setdefault(f"{model.package}/{model.family}", []).append(row)
    lines = ["| family | right | operators | kernels | largest difference |", "| --- " * 5 + "|"]
    for family, members in sorted(families.items()):
        right = [row for row in members if row["status"] == "right"]
        sizes = [span([row.get(key, 0) for row in members]) for key in ("operators", "kernels")]
        worst = max((row["error"] for row in right), default=float("nan"))
        cells = (family, f"{len(right)} of {len(members)}", *sizes, f"{worst:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def span(numbers: list[int]) -> str:
    """The smallest and the largest of some numbers."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def main() -> None:
    """Measure what is asked for and append to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--all", action="store_true", help="every network, not one of each family")
    parser.add_argument("--stop-after", choices=("import", "plan", "run"), default="run")
    parser.add_argument("--table", action="store_true", help="print the file's rows by family")
    parser.add_argument("--one", metavar="NETWORK", help="print the row of one network")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        print(json.dumps(one_row(options.one, options.stop_after)))
        return
    if options.output is None:
        parser.error("name a file with --output")
    rows = []
    if options.output.exists():
        rows = [json.loads(line) for line in options.output.read_text().splitlines()]
    if options.table:
        print(table(rows))
        return
    known = {row["model"] for row in rows}
    for key in ZOO if options.all else smallest_of_each_family():
        if key in known or not (not options.only or any(part in key for part in options.only)):
            continue
        row = row_of_child(key, options.stop_after)
        print(row, flush=True)
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
