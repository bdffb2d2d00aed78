"""Time every kernel of models or blocks alone, fused and unfused, beside the predicted time.

Writes one JSON table. Kernels that are equal (structural hash) are measured once, and those that
the output file already holds are not measured again.

    python benchmarks/kernel_times.py resnet50 bert --dtype float16 -o times.json     # this GPU
    python benchmarks/kernel_times.py fire --target llvm -o times.json
    python benchmarks/kernel_times.py resnet50 --target cuda:sm_90 --save kernels.xz  # no GPU needed
    python benchmarks/kernel_times.py --load kernels.xz -o times.json                 # on the GPU

On CUDA ``measured_us`` is the time of a launch inside a CUDA graph of many, with the data in the
level-2 cache where it fits; ``cold_us`` (``--flush``) the same with argument sets used in turn, too
many for the cache; ``launched_us`` that of back-to-back launches from the host. On a CPU
``measured_us`` is TVM's ``time_evaluator``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import itertools
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: What a row holds, in the order of the file.
COLUMNS = (
    "model", "dtype", "hash", "template", "strategy", "form", "options", "ops", "kind", "members", "anchors",
    "calls", "flops", "bytes", "out", "grid", "threads", "registers", "spill_bytes", "shared_bytes",
    "predicted_us", "predicted_grid", "predicted_threads", "predicted_registers", "predicted_shared",
    "measured_us", "cold_us", "launched_us", "error",
)  # fmt: skip
#: Those that hold texts, of which the file keeps each once.
_TEXTS = ("model", "dtype", "template", "strategy", "form", "options", "ops", "kind", "error")
#: Seconds after which a kernel that is still compiling is given up.
_LIMIT = 120.0


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation of two sequences; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    if len(x) < 2 or len(set(x)) < 2 or len(set(y)) < 2:
        return float("nan")
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def collect(models: Iterable[str], dtypes: Iterable[str], target: Any) -> list[Any]:
    """Lower models in every dtype and return their distinct kernels."""
    from kernel_list import kernels_of, load_model

    found: dict[str, Any] = {}
    for name, dtype in itertools.product(models, dtypes):
        start = time.perf_counter()
        for kernel in kernels_of(name, load_model(name, dtype), target):
            found.setdefault(kernel.row["hash"], kernel)
        seconds = time.perf_counter() - start
        print(f"{name} {dtype}: {len(found)} kernels so far, {seconds:.0f} s", file=sys.stderr)
    return list(found.values())


def measure(
    items: Sequence[dict[str, Any]],
    target: str,
    *,
    jobs: int = 1,
    seconds: float = 1e9,
    flush: bool = False,
    graph: bool = True,
) -> Iterator[dict[str, Any]]:
    """Compile kernels in parallel, time them one at a time, and yield each row when it is done.

    Parameters
    ----------
    items : sequence of dict
        ``row``, ``outputs`` and ``func`` (JSON) of each kernel.
    target : str
        Target that this machine can run.
    jobs : int
        Processes that compile; one of them times at any moment.
    seconds : float
        No kernel is begun after this time.
    flush : bool
        Also time with a cold level-2 cache.
    graph : bool
        Whether to time through CUDA graphs; else ``measured_us`` is ``launched_us``.
    """
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    # A lock on a file is released when its process dies; multiprocessing's own is not.
    folder = tempfile.TemporaryDirectory()
    gpu = os.path.join(folder.name, "gpu.lock")
    deadline = time.monotonic() + seconds
    for i, item in enumerate(items):
        tasks.put((i, item))

    def start() -> Any:
        args = (tasks, results, gpu, target, flush, graph, deadline)
        process = context.Process(target=_work, args=args, daemon=True)
        process.start()
        return process

    processes = [start() for _ in range(min(jobs, len(items)))]
    running: dict[int, tuple[int, float]] = {}  # item and its start, by process id
    done = 0
    while done < len(items) and (processes or not results.empty()):
        try:
            kind, pid, index, row = results.get(timeout=1.0)
        except queue.Empty:
            for process in list(processes):
                index, begun = running.get(process.pid, (-1, time.monotonic()))
                late = time.monotonic() - begun > _LIMIT
                if process.is_alive() and not late:
                    continue
                process.kill()
                processes.remove(process)
                if index >= 0:  # it died on a kernel, or is stuck: the kernel is at fault
                    done += 1
                    running.pop(process.pid)
                    yield {**items[index]["row"], "error": "timeout" if late else "crashed"}
                    processes.append(start())
            continue
        if kind == "begun":
            running[pid] = (index, time.monotonic())
        else:
            running.pop(pid, None)
            done += 1
            yield row
    for process in processes:
        process.kill()
    folder.cleanup()


@contextlib.contextmanager
def _alone(lock: str) -> Iterator[None]:
    """Hold the lock file: one process at a time uses the device."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _work(
    tasks: Any,
    results: Any,
    gpu: str,
    target: str,
    flush: bool,
    graph: bool,
    deadline: float,
) -> None:
    """Compile and time kernels until none is left; a process that a CUDA error broke ends."""
    import tvm
    from kernel_timer import CudaTimer

    from tvm_fusion.targets import parse_target

    resolved = parse_target(target)
    timer = CudaTimer() if resolved.kind.name == "cuda" else None
    while time.monotonic() < deadline:
        try:
            index, item = tasks.get(timeout=10.0)
        except queue.Empty:
            return
        results.put(("begun", os.getpid(), index, None))
        row = dict(item["row"])
        try:
            func = tvm.ir.load_json(item["func"])
            row.update(_time_one(func, item, resolved, timer, gpu, flush, graph))
        except (RuntimeError, ValueError, TypeError) as error:  # what TVM and the driver raise
            row["error"] = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        results.put(("done", os.getpid(), index, row))
        if "CUDA" in row.get("error", ""):
            results.close()
            results.join_thread()
            os._exit(1)  # the context is lost: a new process gets a new one


def _time_one(
    func: Any, item: dict[str, Any], target: Any, timer: Any, gpu: str, flush: bool, graph: bool
) -> dict[str, Any]:
    import tvm
    import tvm_ffi
    from kernel_timer import build, random_arrays, specs_of, time_with_evaluator

    built, specs = build(func, target), specs_of(func)
    if timer is None:
        with _alone(gpu):
            arrays = random_arrays(specs)
            return {"measured_us": round(time_with_evaluator(built, arrays, tvm.cpu(), 20), 3)}
    out: dict[str, Any] = timer.resources(built)
    # Local memory is spills or arrays with run-time indices; only ptxas tells them apart.
    if out.pop("local_bytes", 0):
        from tvm_fusion.build.ptxas import kernel_resources

        reports = kernel_resources(built.source, str(target.attrs["arch"])).values()
        out["spill_bytes"] = sum(r.spill_bytes for r in reports)
    else:
        out["spill_bytes"] = 0
    call = built.executable["kernel"]
    with _alone(gpu):
        warm = timer.arguments(specs, item["outputs"], 1)
        if graph:
            out["measured_us"] = timer.time(call, warm)
        sets = timer.cold_sets(specs) if flush and graph else 0
        if sets:
            cold = timer.arguments(specs, item["outputs"], sets)
            out["cold_us"] = timer.time(call, cold, nodes=max(sets, 20))
            warm = timer.arguments(specs, item["outputs"], 1)  # the pools may have moved
        tensors = [tvm_ffi.from_dlpack(a) for a in warm[0]]
        out["launched_us"] = time_with_evaluator(built, tensors, tvm.cuda(0), 5)
        out.setdefault("measured_us", out["launched_us"])
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in out.items()}


def machine(target: str) -> dict[str, Any]:
    """What was measured where: device, driver, date, commit, versions."""
    import tvm

    from tvm_fusion.targets import parse_target

    def run(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""

    resolved = parse_target(target)
    cuda = resolved.kind.name == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    folder = str(Path(__file__).parent)
    return {
        "target": resolved.kind.name + (f":{resolved.attrs['arch']}" if cuda else ""),
        "device": tvm.cuda(0).device_name if cuda else "CPU",
        "driver": run(*query) if cuda else "",
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("COMMIT")
        or run("git", "-C", folder, "rev-parse", "--short", "HEAD"),
        "tvm": tvm.__version__,
    }


def write_table(path: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows compactly: names of the columns in use once, each text once, a line per row."""
    texts: dict[str, int] = {}
    columns = [c for c in COLUMNS if any(row.get(c) is not None for row in rows)]
    indexed = [c for c in columns if c in _TEXTS]
    lines = []
    for row in rows:
        flat = dict(row)
        if not isinstance(row["ops"], str):
            flat["ops"] = _shorten(row["ops"])
            flat["options"] = ",".join(f"{k}={v}" for k, v in sorted(row["options"].items()))
        for column in indexed:
            flat[column] = texts.setdefault(flat.get(column) or "", len(texts))
        lines.append(json.dumps([flat.get(c) for c in columns], separators=(",", ":")))
    head = {**about, "columns": columns, "indexed": indexed, "texts": list(texts)}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _shorten(ops: Sequence[str]) -> str:
    """Join operator types; a run of one type is ``add*3``."""
    runs = ((op, len(list(group))) for op, group in itertools.groupby(ops))
    return " ".join(op if n == 1 else f"{op}*{n}" for op, n in runs)


def read_table(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read what `write_table` wrote: what was measured where, and the rows."""
    about = json.loads(path.read_text())
    columns, rows = about.pop("columns"), about.pop("rows")
    texts, indexed = about.pop("texts"), set(about.pop("indexed"))
    return about, [
        {c: texts[v] if c in indexed else v for c, v in zip(columns, row, strict=True)}
        for row in rows
    ]


#: Estimate and reading of each, beside the time.
_ESTIMATES = (
    ("predicted_registers", "registers"),
    ("predicted_shared", "shared_bytes"),
    ("predicted_grid", "grid"),
)


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """Print how well times (by strategy and dtype), registers and shared memory are predicted."""
    good = [r for r in rows if r.get("measured_us") and r.get("predicted_us")]
    print(f"{len(good)} kernels measured, {sum(bool(r.get('error')) for r in rows)} failed")
    for dtype in sorted({r["dtype"] for r in good}):
        ours = [r for r in good if r["dtype"] == dtype]
        for strategy in ["all", *sorted({r["strategy"] for r in ours})]:
            some = [r for r in ours if strategy in ("all", r["strategy"])]
            p, m = ([r[k] for r in some] for k in ("predicted_us", "measured_us"))
            ratio = float(np.exp(np.median(np.log(np.divide(m, p)))))
            print(
                f"  {dtype:9} {strategy:11} {len(some):5} kernels  Spearman {spearman(p, m):5.3f}"
                f"  measured / predicted {ratio:6.2f} (median)"
            )
    for estimate, reading in _ESTIMATES:
        some = [r for r in rows if r.get(estimate) is not None and r.get(reading) is not None]
        if some:
            p, m = ([r[k] for r in some] for k in (estimate, reading))
            print(f"  {reading:21} {len(some):5} kernels  Spearman {spearman(p, m):5.3f}")


def main() -> None:
    """Read the command line, collect, measure, write, summarise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="model files, light models or blocks")
    parser.add_argument("--dtype", action="append", help="repeatable; default: float32")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--save", type=Path, help="write the kernels here and do not measure")
    parser.add_argument("--load", type=Path, action="append", default=[], help="kernels to measure")
    parser.add_argument("-o", "--output", type=Path, default=Path("kernel_times.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after this")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--flush", action="store_true", help="also time with a cold cache")
    parser.add_argument("--no-graph", action="store_true", help="time host launches, not graphs")
    args = parser.parse_args()

    import tvm
    from kernel_list import read_kernels, save_kernels

    from tvm_fusion.targets import parse_target

    kernels = collect(args.models, args.dtype or ["float32"], parse_target(args.target))
    if args.save:
        save_kernels(args.save, kernels)
        return
    items = [
        {"row": k.row, "outputs": k.outputs, "func": tvm.ir.save_json(k.func)} for k in kernels
    ]
    items += [item for path in args.load for item in read_kernels(path)]
    about, rows = machine(args.target), []
    if args.output.exists():
        before, rows = read_table(args.output)
        if any(before.get(k) != about[k] for k in ("target", "device")):
            parser.error(f"{args.output} was measured on {before.get('device')}; name another file")
    known = {r["hash"] for r in rows}
    todo = {i["row"]["hash"]: i for i in reversed(items) if i["row"]["hash"] not in known}
    for row in measure(
        list(reversed(todo.values())),
        args.target,
        jobs=args.jobs,
        seconds=args.seconds,
        flush=args.flush,
        graph=not args.no_graph,
    ):
        rows.append(row)
        if len(rows) % 20 == 0:
            write_table(args.output, about, rows)
    write_table(args.output, about, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
