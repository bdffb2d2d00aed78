"""Time the attention kernel alone, tile by tile, beside PyTorch's scaled_dot_product_attention.

    python benchmarks/attention_times.py --build libs --target cuda:sm_90   # compile, on any machine with nvcc
    python benchmarks/attention_times.py --libraries libs --out times.json  # time on the GPU, and PyTorch after it

Every time is that of one CUDA graph with 20 copies on the same buffers, divided by 20 (`protocol.py`). PyTorch runs
in a process of its own, once as it chooses and once for each backend that takes the shapes. Errors are against float64,
of the first and the last head.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

#: Name: batch, heads, heads of keys and values, queries, keys, places; whether causal.
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "bert128": (1, 12, 12, 128, 128, 64, False),
    "short": (8, 12, 12, 128, 128, 64, False),
    "middle": (8, 12, 12, 512, 512, 64, False),
    "long": (4, 32, 32, 2048, 2048, 128, False),
    "long_causal": (4, 32, 32, 2048, 2048, 128, True),
    "grouped": (4, 32, 8, 2048, 2048, 128, False),
}

_COPIES = 20


def flops_of(shape: str) -> float:
    """FLOPs of the two products; half of them where the mask is causal."""
    batch, heads, _, rows, keys, width, causal = SHAPES[shape]
    return 4.0 * batch * heads * rows * keys * width / (2 if causal else 1)


def inputs_of(shape: str, dtype: str = "float16") -> list[np.ndarray]:
    """Queries, keys and values."""
    batch, heads, groups, rows, keys, width, _ = SHAPES[shape]
    rng = np.random.default_rng(0)
    sizes = ((batch, heads, rows), *((batch, groups, keys),) * 2)
    return [rng.standard_normal((*size, width), dtype=np.float32).astype(dtype) for size in sizes]


def expected(shape: str, arrays: list[np.ndarray], head: int) -> np.ndarray:
    """The result of the last batch's ``head``, in float64."""
    _, heads, groups, rows, keys, width, causal = SHAPES[shape]
    q = arrays[0][-1, head].astype(np.float64)
    k, v = (a[-1, head // (heads // groups)].astype(np.float64) for a in arrays[1:])
    scores = q @ k.T / width**0.5
    if causal:
        scores[np.arange(keys)[None] > np.arange(rows)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def error_of(shape: str, arrays: list[np.ndarray], result: np.ndarray) -> float:
    """Largest error over the largest value, of two heads of the last batch."""
    worst = 0.0
    for head in (0, SHAPES[shape][1] - 1):
        want = expected(shape, arrays, head)
        worst = max(worst, float(np.abs(result[-1, head] - want).max() / np.abs(want).max()))
    return worst


# -- ours ------------------------------------------------------------------------------------------------


def function_of(shape: str, dtype: str = "float16") -> Any:
    """The group's function as LowerGroups makes it."""
    from tvm import relax, te, tirx

    from tvm_fusion.testing.groups import group_function, group_module

    op = relax.op
    batch, heads, groups, _, keys, width, causal = SHAPES[shape]

    def hide(scores: te.Tensor) -> te.Tensor:
        lowest = tirx.const(-np.inf, dtype)

        def element(*index: Any) -> Any:
            return tirx.if_then_else(index[-1] <= index[-2], scores(*index), lowest)

        return te.compute(scores.shape, element, name="causal")

    def make(builder: Any, q: Any, k: Any, v: Any) -> Any:
        emit = builder.emit
        if groups != heads:
            one, all_ = (
                (batch, groups, 1, keys, width),
                (batch, groups, heads // groups, keys, width),
            )
            k, v = (
                emit(op.reshape(emit(op.broadcast_to(emit(op.reshape(x, one)), all_)), (batch, heads, keys, width)))
                for x in (k, v)
            )  # fmt: skip
        scores = emit(op.matmul(q, emit(op.permute_dims(k, (0, 1, 3, 2)))))
        scores = emit(op.multiply(scores, relax.const(width**-0.5, dtype)))
        if causal:
            scores = emit(builder.call_te(hide, scores))
        return emit(op.matmul(emit(op.nn.softmax(scores)), v))

    shapes = [a.shape for a in inputs_of(shape, dtype)]
    return group_function(group_module(shapes, dtype, make))


def choices_of(shape: str, target: Any, count: int) -> list[Any]:
    """Tiles of a shape, by predicted time."""
    from tvm_fusion.schedules.cuda.attention.kernel import problem_of
    from tvm_fusion.schedules.cuda.attention.recognition import attention

    from tvm_fusion.devices import device_for
    from tvm_fusion.guards.attention_tiles import best_attention_tiles

    problem = problem_of(attention(function_of(shape)))
    return list(best_attention_tiles(problem, device_for(target), count))


def name_of(tile: Any) -> str:
    """Keys, row fragments, warps of rows, warps of keys, stages."""
    return "-".join(str(n) for n in dataclasses.astuple(tile))


def build_one(request: tuple[str, int, str, str]) -> dict[str, Any]:
    """Compile one tile of one shape into a library."""
    import tvm
    from tvm_fusion.schedules.cuda.attention.kernel import attention_kernel
    from tvm_fusion.schedules.cuda.attention.recognition import attention

    from tvm_fusion.build.executable import device_sources
    from tvm_fusion.build.ptxas import kernel_resources
    from tvm_fusion.targets import parse_target

    shape, number, text, folder = request
    target = parse_target(text)
    choice = choices_of(shape, target, number + 1)[number]
    path = Path(folder) / f"{shape}-{name_of(choice.tile)}.so"
    note = path.with_suffix(".json")
    if note.exists():
        return json.loads(note.read_text())
    func = attention_kernel(attention(function_of(shape)), choice.tile)
    func = func.with_attrs({"global_symbol": "kernel", "tirx.is_scheduled": True})
    with target:
        built = tvm.compile(tvm.IRModule({"kernel": func}), target=target)
    (used,) = kernel_resources(
        "\n".join(device_sources(built.mod)), str(target.attrs["arch"])
    ).values()
    built.export_library(str(path))
    row = {
        "shape": shape, "tile": name_of(choice.tile), "predicted_us": round(choice.microseconds, 2),
        "registers": used.registers, "spill_bytes": used.spill_bytes, "library": path.name,
    }  # fmt: skip
    note.write_text(json.dumps(row))
    return row


def build_all(shapes: list[str], target: str, folder: Path, count: int, workers: int) -> None:
    """Compile the best tiles of every shape."""
    from tvm_fusion.targets import parse_target

    folder.mkdir(parents=True, exist_ok=True)
    requests = [
        (shape, number, target, str(folder))
        for shape in shapes
        for number in range(len(choices_of(shape, parse_target(target), count)))
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for row in pool.map(build_one, requests):
            print(json.dumps(row), flush=True)


def time_ours(shapes: list[str], folder: Path) -> list[dict[str, Any]]:
    """Time every library of some shapes on the GPU."""
    import tvm
    from kernel_timer import CudaTimer, Spec

    timer, rows = CudaTimer(), []
    for note in sorted(folder.glob("*.json")):
        row = json.loads(note.read_text())
        if row["shape"] not in shapes:
            continue
        arrays = inputs_of(row["shape"])
        kernel = tvm.runtime.load_module(str(folder / row["library"]))["kernel"]
        given = [tvm.runtime.tensor(a, timer.device) for a in arrays]
        result = tvm.runtime.tensor(np.full(arrays[0].shape, np.nan, "float16"), timer.device)
        kernel(*given, result)
        row["error"] = error_of(row["shape"], arrays, result.numpy().astype(np.float64))
        specs = [Spec(a.shape, "float16") for a in (*arrays, arrays[0])]
        row["us"] = round(timer.time(kernel, timer.arguments(specs, 1, 1), _COPIES), 3)
        row["tflop_per_s"] = round(flops_of(row["shape"]) / row["us"] / 1e6, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# -- PyTorch ---------------------------------------------------------------------------------------------


def time_torch(shapes: list[str]) -> list[dict[str, Any]]:
    """Time PyTorch's attention, as it chooses and by backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from torch_timer import graph_time

    backends = {"default": None} | {
        name: getattr(SDPBackend, name)
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
        if hasattr(SDPBackend, name)
    }
    rows = []
    for shape in shapes:
        arrays = inputs_of(shape)
        q, k, v = (torch.from_numpy(a).cuda() for a in arrays)
        causal, grouped = SHAPES[shape][-1], SHAPES[shape][1] != SHAPES[shape][2]

        def run(
            q: Any = q, k: Any = k, v: Any = v, causal: bool = causal, grouped: bool = grouped
        ) -> Any:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        for name, backend in backends.items():
            row: dict[str, Any] = {"shape": shape, "backend": name, "torch": torch.__version__}
            try:
                if backend is None:
                    row["us"], result = graph_time(run)
                else:
                    with sdpa_kernel(backend):
                        row["us"], result = graph_time(run)
            except RuntimeError as error:
                row["missing"] = str(error).splitlines()[0]
            else:
                row["error"] = error_of(shape, arrays, result.double().cpu().numpy())
                row["tflop_per_s"] = round(flops_of(shape) / row["us"] / 1e6, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


# -- the command -----------------------------------------------------------------------------------------


def main() -> None:
    """Build, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="some of " + ", ".join(SHAPES))
    parser.add_argument(
        "--tiles", type=int, default=8, help="tiles of each shape, by predicted time"
    )
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--build", type=Path, help="only compile libraries into this folder")
    parser.add_argument("--libraries", type=Path, default=Path("attention-libraries"))
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--torch", action="store_true", help="only time PyTorch")
    parser.add_argument("--no-torch", action="store_true", help="do not time PyTorch")
    parser.add_argument("--out", type=Path, help="results as JSON")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    if options.torch:
        rows = {"torch": time_torch(shapes)}
    else:
        build_all(
            shapes,
            options.target,
            options.build or options.libraries,
            options.tiles,
            options.workers,
        )
        if options.build:
            return
        rows = {"ours": time_ours(shapes, options.libraries)}
        if not options.no_torch:
            command = [sys.executable, __file__, "--torch", "--shapes", options.shapes]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(done.stdout, done.stderr[-2000:] if done.returncode else "")
            rows["torch"] = [
                json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"
            ]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
