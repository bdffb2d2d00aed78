"""Import networks of torchvision, timm and transformers; compile them for the CPU and compare with PyTorch.

    python benchmarks/torch_import.py --output results.jsonl [--only timm/ swin] [--all] [--stop-after import|plan]

One line of JSON a network: operators, groups, the refusal if there is one, and the largest difference from PyTorch,
relative to the largest value of the output. Networks that the file holds already are skipped. Weights are random, so
nothing is downloaded; each network's package must be installed.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tvm_fusion as tf
from tvm_fusion.errors import FusionError
from tvm_fusion.testing.torch_zoo import ZOO, ZooModel, smallest_of_each_family


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
    return {"status": "right" if row["error"] <= 1e-3 else "wrong", **row}


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


def main() -> None:
    """Measure what is asked for and append to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--all", action="store_true", help="every network, not one of each family")
    parser.add_argument("--stop-after", choices=("import", "plan", "run"), default="run")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = set()
    if options.output.exists():
        known = {json.loads(line)["model"] for line in options.output.read_text().splitlines()}
    for key in ZOO if options.all else smallest_of_each_family():
        if key in known or not (not options.only or any(part in key for part in options.only)):
            continue
        start = time.perf_counter()
        row = {"model": key, **measure(ZOO[key], options.stop_after)}
        row["seconds"] = round(time.perf_counter() - start, 1)
        print(row, flush=True)
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
