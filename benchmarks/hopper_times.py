"""Time products of Hopper's copy engine (TMA) beside the templates in use and cuBLAS, shape by shape.

    python benchmarks/hopper_times.py --build libs                    # compile, on any machine with nvcc
    python benchmarks/hopper_times.py --libraries libs --seconds 480 --out times.json     # on the GPU

Every time is that of one CUDA graph with 20 copies on the same buffers, divided by 20 (`kernel_timer.py`); PyTorch's
too, in a process of its own. Before a kernel is timed, its result is compared with float64 on one row of each 64, and
three runs have to give the same bits; after it, what the graph left has to be the same as well. Each process has a
limit of time, so that a kernel that never ends costs no more than that; results are written after each of them.
``predicted_us`` is the model's. ``product_table.py`` makes a table of the results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from products import SHAPES, Shape

#: Rows, columns, stages, and groups that take turns, of the tiles of the copy engine.
TILES = (
    (128, 256, 4, 1), (128, 256, 3, 1), (128, 192, 4, 1), (128, 128, 6, 1), (128, 96, 6, 1), (128, 64, 6, 1),
    (256, 128, 4, 1), (128, 128, 6, 2), (128, 128, 4, 2), (128, 96, 6, 2), (128, 64, 6, 2),
    (64, 256, 4, 2), (64, 192, 4, 2), (64, 128, 6, 2), (64, 64, 6, 2),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled: tiles of the templates in use and of the copy engine (0: those of `TILES`), type, target."""

    tiles: int
    bulk_tiles: int
    dtype: str
    target: str


#: Relative error in the Euclidean norm that is right for a type, copies in a graph, and runs that must agree.
_ERROR = {"float16": 1e-3, "bfloat16": 6e-3}
_COPIES, _REPEATS = 20, 3


def inputs_of(shape: Shape, dtype: str) -> list[np.ndarray]:
    """Activations, weights, then a bias and a residual where there are."""
    from tvm_fusion.build.inputs import numpy_dtype

    rng = np.random.default_rng(0)
    kind = numpy_dtype(dtype)
    made = [
        rng.standard_normal((shape.rows, shape.depth), dtype=np.float32),
        rng.standard_normal((shape.columns, shape.depth), dtype=np.float32) / shape.depth**0.5,
    ]
    if "bias" in shape.after:
        made.append(rng.standard_normal(shape.columns, dtype=np.float32))
    if "residual" in shape.after:
        made.append(rng.standard_normal((shape.rows, shape.columns), dtype=np.float32))
    return [array.astype(kind) for array in made]


def checked_rows(shape: Shape) -> np.ndarray:
    """One row of each 64."""
    firsts = np.arange(0, shape.rows, 64)
    offsets = np.random.default_rng(1).integers(0, 64, len(firsts))
    return np.minimum(firsts + offsets, shape.rows - 1)


def expected(shape: Shape, arrays: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Some rows of the result, in float64."""
    found = arrays[0][rows].astype(np.float64) @ arrays[1].astype(np.float64).T
    rest = arrays[2:]
    if "bias" in shape.after:
        found += rest.pop(0).astype(np.float64)
    if "gelu" in shape.after:
        found *= 0.5 + 0.5 * np.vectorize(math.erf, otypes=[np.float64])(found / 2**0.5)
    if "residual" in shape.after:
        found += rest.pop(0)[rows].astype(np.float64)
    return found


def error_of(result: np.ndarray, reference: np.ndarray) -> float:
    """Relative error in the Euclidean norm."""
    return float(np.linalg.norm(result.astype(np.float64) - reference) / np.linalg.norm(reference))


# -- ours ------------------------------------------------------------------------------------------------


def form_of(shape: Shape, dtype: str, target: Any) -> Any:
    """The function as templates see it."""
    from tvm import relax
    from tvm_fusion.schedules.base import CONSTANTS
    from tvm_fusion.schedules.cuda.tensor_core.template import products_of

    from tvm_fusion.testing.groups import group_function, group_module

    op = relax.op

    def make(builder: Any, x: Any, w: Any, *rest: Any) -> Any:
        emit, others = builder.emit, list(rest)
        found = emit(op.matmul(x, emit(op.permute_dims(w))))
        if "bias" in shape.after:
            found = emit(op.add(found, others.pop(0)))
        if "gelu" in shape.after:
            found = emit(op.nn.gelu(found))
        if "residual" in shape.after:
            found = emit(op.add(found, others.pop(0)))
        return found

    sizes = [(shape.rows, shape.depth), (shape.columns, shape.depth)]
    sizes += [(shape.columns,)] if "bias" in shape.after else []
    sizes += [(shape.rows, shape.columns)] if "residual" in shape.after else []
    func = group_function(group_module(sizes, dtype, make)).with_attr(
        "tvm_fusion.strategy", "vertical"
    )
    constants = [1, 2] if "bias" in shape.after else [1]
    return products_of(func.with_attr(CONSTANTS, constants), target)[0][1]


def choices_of(form: Any, target: Any, options: Options) -> list[Any]:
    """Tiles with their predicted times: the best of the templates in use, and those of the copy engine."""
    from tvm_fusion.schedules.cuda.tensor_core.tile import problem_of

    from tvm_fusion.devices import device_for
    from tvm_fusion.guards.bulk_tiles import bulk_choices
    from tvm_fusion.guards.split_tiles import best_choices

    problem, device = problem_of(form), device_for(target)
    used = list(best_choices(problem, device, options.tiles)) if options.tiles else []
    found = bulk_choices(problem, device, 1 << 16)
    if options.bulk_tiles:
        return [*used, *found[: options.bulk_tiles]]
    # Interleaved columns are stored faster.
    widest = max((choice.tile.bulk for choice in found), default=1)
    bulk = [
        choice
        for choice in found
        if (t := choice.tile).bulk == widest and (t.rows, t.columns, t.stages, t.turns) in TILES
    ]
    return [*used, *bulk]


def name_of(tile: Any) -> str:
    """Sizes of a tile, as a word."""
    kind = "bulk" if hasattr(tile, "bulk") else "warpgroup" if tile.warpgroup else "mma"
    return "-".join([kind, *(str(int(n)) for n in dataclasses.astuple(tile))])


def build_one(request: tuple[str, int, Options, str]) -> dict[str, Any]:
    """Compile one tile of one shape into a library, if it is not there."""
    import tvm
    from tvm_fusion.schedules.cuda.tensor_core.bulk import bulk_kernel
    from tvm_fusion.schedules.cuda.tensor_core.template import kernel_of
    from tvm_fusion.schedules.cuda.tensor_core.tile import problem_of

    from tvm_fusion.build import tir_pipeline
    from tvm_fusion.build.executable import device_sources
    from tvm_fusion.build.ptxas import kernel_resources
    from tvm_fusion.devices import device_for
    from tvm_fusion.targets import parse_target

    name, number, options, folder = request
    target, dtype = parse_target(options.target), options.dtype
    form, device = form_of(SHAPES[name], dtype, target), device_for(target)
    choice = choices_of(form, target, options)[number]
    tile = choice.tile
    path = Path(folder) / f"{name}-{dtype}-{name_of(tile)}.so"
    note = path.with_suffix(".json")
    if note.exists():
        return json.loads(note.read_text())
    if hasattr(tile, "bulk"):
        func = bulk_kernel(form, tile, device)
    else:
        func = kernel_of(form, tile, tile.requested_bytes(problem_of(form), device))
    func = func.with_attrs({"global_symbol": "kernel", "tirx.is_scheduled": True})
    with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
        built = tvm.compile(
            tvm.IRModule({"kernel": func}), target=target, tir_pipeline=tir_pipeline.NAME
        )
    (used,) = kernel_resources(
        "\n".join(device_sources(built.mod)), str(target.attrs["arch"])
    ).values()
    built.export_library(str(path))
    row = {
        "shape": name, "dtype": dtype, "tile": name_of(tile), "library": path.name,
        "predicted_us": round(choice.microseconds, 2), "registers": used.registers,
        "spill_bytes": used.spill_bytes,
    }  # fmt: skip
    note.write_text(json.dumps(row))
    return row


def build_all(names: list[str], args: argparse.Namespace, folder: Path, until: float) -> None:
    """Compile the tiles of every shape, as many as time allows."""
    from tvm_fusion.targets import parse_target

    folder.mkdir(parents=True, exist_ok=True)
    options = Options(args.tiles, args.bulk_tiles, args.dtype, args.target)
    target, requests = parse_target(options.target), []
    for name in names:
        choices = choices_of(form_of(SHAPES[name], options.dtype, target), target, options)
        requests += [(name, number, options, str(folder)) for number in range(len(choices))]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        futures = [pool.submit(build_one, request) for request in requests]
        try:
            for future in concurrent.futures.as_completed(futures, max(1.0, until - time.time())):
                print(json.dumps(future.result()), flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
            print(json.dumps({"build": "stopped by --seconds"}), flush=True)


def time_ours(name: str, kind: str, dtype: str, folder: Path, timer: Any) -> None:
    """Check and time the libraries of a shape and kind (``bulk`` or ``used``); print a row for each."""
    import tvm

    from tvm_fusion.build.inputs import numpy_dtype

    shape = SHAPES[name]
    arrays, rows = inputs_of(shape, dtype), checked_rows(shape)
    reference = expected(shape, arrays, rows)
    given = [tvm.runtime.tensor(array, timer.device) for array in arrays]
    poison = np.full((shape.rows, shape.columns), np.nan, numpy_dtype(dtype))
    for note in sorted(folder.glob(f"{name}-{dtype}-*.json")):
        row = json.loads(note.read_text())
        if (kind == "bulk") != row["tile"].startswith("bulk"):
            continue
        print(json.dumps({"starts": row["tile"]}), flush=True)
        kernel = tvm.runtime.load_module(str(folder / row["library"]))["kernel"]
        result = tvm.runtime.tensor(poison, timer.device)
        seen = []
        for _ in range(_REPEATS):
            result.copyfrom(poison)
            kernel(*given, result)
            timer.device.sync()
            seen.append(result.numpy())
        row["error"] = error_of(seen[0][rows], reference)
        row["right"] = bool(row["error"] <= _ERROR[dtype])
        row["same_bits"] = all(seen[0].tobytes() == other.tobytes() for other in seen[1:])
        row["us"] = round(timer.time(kernel, [[*given, result]], _COPIES), 3)
        row["same_bits_in_a_graph"] = seen[0].tobytes() == result.numpy().tobytes()
        row["tflop_per_s"] = round(shape.flops / row["us"] / 1e6, 1)
        print(json.dumps(row), flush=True)


# -- PyTorch ---------------------------------------------------------------------------------------------


def time_torch(name: str, dtype: str) -> None:
    """Time PyTorch's product alone (cuBLAS), and with what follows it; print a row for each."""
    import torch
    from torch.nn import functional
    from torch_timer import graph_time

    shape = SHAPES[name]
    kind = getattr(torch, dtype)
    make = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> Any:
        return torch.randn(*size, generator=make, device="cuda", dtype=torch.float32).to(kind)

    x = random(shape.rows, shape.depth)
    w = random(shape.columns, shape.depth) / shape.depth**0.5
    bias = random(shape.columns) if "bias" in shape.after else None
    residual = random(shape.rows, shape.columns) if "residual" in shape.after else None

    def whole() -> Any:
        found = functional.linear(x, w, bias)
        if "gelu" in shape.after:
            found = functional.gelu(found)
        return found if residual is None else found + residual

    contenders = {"cublas": lambda: functional.linear(x, w)}
    if shape.after != "nothing":
        contenders["cublas and the rest"] = whole
    for contender, call in contenders.items():
        us, _ = graph_time(call)
        row = {
            "shape": name, "dtype": dtype, "tile": contender, "us": us,
            "tflop_per_s": round(shape.flops / us / 1e6, 1), "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


# -- the command -----------------------------------------------------------------------------------------


def in_child(arguments: list[str], seconds: float, script: str = __file__) -> list[dict[str, Any]]:
    """The rows that a script prints in a process of its own, up to a limit of time."""
    if seconds < 5:
        return [{"not_run": arguments, "why": "no time was left"}]
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, failure = "", [f"stopped after {seconds:.0f} s"]
    for wait in (seconds, 10.0):
        try:
            out, errors = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:  # and again, where the driver does not let it go
            process.kill()
            continue
        if process.returncode >= 0:
            failure = errors.strip().splitlines()[-1:] if process.returncode else []
        break
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    done = [row for row in rows if "starts" not in row]
    if failure:
        running = [row["starts"] for row in rows if "starts" in row][len(done) :]
        done.append({"failed": arguments, "why": failure[0], "running": running})
    for row in done:
        print(json.dumps(row), flush=True)
    return done


def time_all(names: list[str], options: argparse.Namespace, until: float) -> None:
    """Time everything, a process for each shape and kind, and write what there is after each."""
    found: list[dict[str, Any]] = []
    common = ["--dtype", options.dtype, "--libraries", str(options.libraries)]
    kinds = ["bulk", "used"] if options.tiles else ["bulk"]
    for some in batches(names, options.together):
        listed = ",".join(some)
        steps = [["--time", f"{listed}:{kind}", *common] for kind in kinds]
        if "smoke" not in some and not options.no_torch:
            steps.insert(0, ["--torch", listed, *common])
        for step in steps:
            limit = min(options.limit * len(some), until - time.time())
            found += in_child(step, limit)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
        if "smoke" in some and not any(r.get("right") and "bulk" in r["tile"] for r in found):
            print("the smallest product of the copy engine failed; nothing else is run")
            return


def batches(names: list[str], together: int) -> list[list[str]]:
    """Shapes that one process times; the first one always alone."""
    rest = names[1:]
    return [names[:1], *(rest[i : i + together] for i in range(0, len(rest), together))]


def main() -> None:
    """Build, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="some of " + ", ".join(SHAPES))
    parser.add_argument("--tiles", type=int, default=2, help="tiles of the other templates")
    parser.add_argument(
        "--bulk-tiles", type=int, default=0, help="tiles of the copy engine, best first; 0: a list"
    )
    parser.add_argument("--dtype", default="float16", choices=sorted(_ERROR))
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--build", type=Path, help="only compile libraries into this folder")
    parser.add_argument("--libraries", type=Path, default=Path("hopper-libraries"))
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of the whole command")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of one shape at most")
    parser.add_argument("--together", type=int, default=1, help="shapes that a process times")
    parser.add_argument("--no-torch", action="store_true", help="do not time PyTorch")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--time", help=argparse.SUPPRESS)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        from kernel_timer import CudaTimer

        shapes, kind = options.time.split(":")
        for name in shapes.split(","):
            time_ours(name, kind, options.dtype, options.libraries, CudaTimer())
        return
    if options.torch:
        for name in options.torch.split(","):
            time_torch(name, options.dtype)
        return
    names, until = options.shapes.split(","), time.time() + options.seconds
    # Two thirds of the time are left for the GPU.
    build_until = until if options.build else time.time() + options.seconds / 3
    build_all(names, options, options.build or options.libraries, build_until)
    if not options.build:
        time_all(names, options, until)


if __name__ == "__main__":
    main()
