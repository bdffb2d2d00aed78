"""When the thread pool pays on a CPU: small kernels timed with their loops parallel, serial, and as scheduled.

``python benchmarks/cpu_threads.py [TARGET]`` prints a table: what `schedules/cpu/threads.py` estimates, and µs
with every loop parallel, none, and as it decides. ``TVM_NUM_THREADS`` sets the threads (TVM takes half of the logical
cores by itself). Times are the least of interleaved measurements, so that other work of the machine counts little; the
threads are awake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import tvm_ffi
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.analysis import nodes_of
from tvm_fusion.schedules.cpu import threads
from tvm_fusion.schedules.cpu.vectors import lanes

from tvm_fusion.compat import Target, relax, tirx, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op
Case = tuple[str, list[tuple[int, ...]], Callable]

#: Measurements of each side, and least milliseconds of one.
_REPEAT, _MILLISECONDS = 15, 2


def cases() -> Iterator[Case]:
    """Kernels of growing size, from far too small for threads to large enough."""
    for n in (1, 16, 64, 256, 1024, 4096):
        yield f"relu {n}x256", [(n, 256)], lambda b, x: b.emit(op.nn.relu(x))
    for n in (1, 16, 64, 256, 1024):
        yield f"gelu {n}x64", [(n, 64)], lambda b, x: b.emit(op.nn.gelu(x))
        yield f"softmax {n}x64", [(n, 64)], lambda b, x: b.emit(op.nn.softmax(x))
        yield f"mean {n}x7x7", [(1, n, 7, 7)], lambda b, x: b.emit(op.mean(x, axis=[2, 3]))
    for n in (8, 16, 32, 64, 128):
        yield f"conv 3x3 {n}", [(1, n, 14, 14), (n, n, 3, 3)], _conv
        yield f"depthwise {n}", [(1, n, 14, 14), (n, 1, 3, 3)], _depthwise
        yield f"pool {n}", [(1, n, 28, 28)], _pool
        yield f"product {n}", [(n, n), (n, n)], lambda b, x, w: b.emit(op.matmul(x, w))


def _conv(b: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return b.emit(op.nn.relu(b.emit(op.nn.conv2d(x, w, padding=1))))


def _depthwise(b: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return b.emit(op.nn.conv2d(x, w, padding=1, groups=int(w.ty.shape[0])))


def _pool(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return b.emit(op.nn.max_pool2d(x, pool_size=(3, 3), strides=(2, 2)))


def parallel_loops(func: tirx.PrimFunc) -> list[tirx.For]:
    """The loops for the thread pool."""
    found = nodes_of(func.body, tirx.For)
    return [loop for loop in found if loop.kind == tirx.ForKind.PARALLEL]


def serial(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with no loop for the thread pool."""

    def change(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, change)))


def microseconds(funcs: list[tirx.PrimFunc], arrays: list, target: Target) -> list[float]:
    """Least time of each function, measured in turns."""
    clocks = []
    for func in funcs:
        library = tvm.compile(
            tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), target=target
        )
        clocks.append(
            library.mod.time_evaluator(
                "kernel", tvm.cpu(), number=1, repeat=1, min_repeat_ms=_MILLISECONDS
            )
        )
    times: list[list[float]] = [[] for _ in clocks]
    for _ in range(_REPEAT):
        for clock, found in zip(clocks, times, strict=True):
            found.append(1e6 * clock(*arrays).median)
    return [min(found) for found in times]


def main() -> None:
    """Print the table."""
    target = parse_target(sys.argv[1] if len(sys.argv) > 1 else "llvm")
    rng = np.random.default_rng(0)
    number = tvm.get_global_func("runtime.NumThreads")()
    print(f"{target}, {number} threads of TVM, µs")
    print(
        "| kernel | estimate | serial | parallel | as scheduled | parallel loops |\n| --- |"
        + " ---: |" * 5
    )
    for name, shapes, make in cases():
        func = group_function(group_module(shapes, "float32", make))
        with mock.patch.object(threads, "MOST_SERIAL", -1.0):
            every, _ = schedule(func, target)
        chosen, _ = schedule(func, target)
        estimate = sum(threads.nanoseconds(loop, lanes(target)) for loop in parallel_loops(every))
        shapes_of = [[int(extent) for extent in param.ty.shape] for param in every.params]
        arrays = [
            tvm.runtime.tensor(rng.standard_normal(shape).astype("float32")) for shape in shapes_of
        ]
        alone, spread, ours = microseconds([serial(every), every, chosen], arrays, target)
        print(
            f"| {name} | {estimate / 1e3:.2f} | {alone:.2f} | {spread:.2f} | {ours:.2f} | "
            f"{len(parallel_loops(chosen))} of {len(parallel_loops(every))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
