"""JAX: the rows compiled by XLA, timed by events on XLA's own stream.

XLA makes CUDA graphs itself ("command buffers"); it cannot be captured from outside. So the program
holds the 20 copies, chained by optimisation barriers, between two custom calls that record events
(``jax_mark.cc``). A compiled program whose copies were merged is refused.
"""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when JAX starts: graphs of any length, and no pool of most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from protocol import COPIES, REPLAYS, CudaClock, Times, call_time, cpu_times
from rows import ROWS

from .base import Context, Peer, Ready, gpu_alone
from .jax_rows import FORMULAS

_SOURCE = Path(__file__).with_name("jax_mark.cc")
_HOLD, _FLUSH, _END = 0, 1, 2


def build_marks(folder: Path) -> ctypes.CDLL:
    """Compile and load the custom call.

    Raises
    ------
    RuntimeError
        If the compiler rejects it.
    """
    library = folder / f"jax_mark-{os.getpid()}.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{jax.ffi.include_dir()}", str(_SOURCE),
               "-o", str(library), "-ldl"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["?"]
        raise RuntimeError(f"the custom call does not compile: {lines[0]}")
    return ctypes.CDLL(str(library))


class JaxReady(Ready):
    """A function of a weight dictionary and inputs, compiled by XLA."""

    def __init__(
        self, function: Callable[..., Any], weights: Any, inputs: list[Any], last: bool, peer: Jax
    ) -> None:
        self._weights, self._inputs, self._last = weights, inputs, last
        self._clock = clock = peer.clock
        with gpu_alone(peer.context):  # XLA times candidates now; the copies find what it chose
            self._single = jax.jit(function).lower(weights, *inputs).compile()
        jax.block_until_ready(self._single(weights, *inputs))
        if clock is not None:
            self._warm = self._program(function, COPIES, _HOLD)
            self._cold = self._program(function, 1, _FLUSH)

    def _program(self, function: Callable[..., Any], copies: int, start: int) -> Any:
        """Compile a program of marks and copies, and check that all copies are still in it."""
        clock = self._clock
        first, final = (e.value for e in clock._events[0])
        shape = jax.ShapeDtypeStruct((), jnp.int32)

        def mark(token: Any, kind: int, event: int) -> Any:
            call = jax.ffi.ffi_call("benchmark_mark", shape, has_side_effect=True)
            return call(
                token, kind=np.int64(kind), event=np.int64(event),
                address=np.int64(clock._flush_address.value), bytes=np.int64(clock.flush_bytes),
            )  # fmt: skip

        def program(token: Any, weights: Any, *inputs: Any) -> Any:
            token = mark(token, start, first)
            inputs, token = lax.optimization_barrier((inputs, token))
            for _ in range(copies):
                out = function(weights, *inputs)
                inputs, out = lax.optimization_barrier((inputs, out))
            out, token = lax.optimization_barrier((out, token))
            return mark(token, _END, final), out

        token = jnp.zeros((), jnp.int32)
        compiled = jax.jit(program).lower(token, self._weights, *self._inputs).compile()
        expected, found = copies * launches(self._single), launches(compiled) - 2
        if found < expected:
            raise RuntimeError(f"XLA merged the copies: {found} kernels in {copies} copies")
        return compiled

    def call(self) -> Any:
        return self._single(self._weights, *self._inputs)

    def outputs(self) -> list[np.ndarray]:
        out = self.call()
        if self._clock is not None:
            token = jnp.zeros((), jnp.int32)
            out = self._warm(token, self._weights, *self._inputs)[1]
        arrays = [np.asarray(a) for a in (out if isinstance(out, tuple | list) else [out])]
        return [a.transpose(0, 3, 1, 2) if self._last and a.ndim == 4 else a for a in arrays]

    def measure(self) -> Times:
        if self._clock is None:
            return cpu_times(lambda: jax.block_until_ready(self.call()))
        warm, cold = self._replays(self._warm), self._replays(self._cold)
        last: list[Any] = []

        def call() -> None:
            last[:] = [self.call()]

        return Times(warm / COPIES, cold, call_time(call, lambda: jax.block_until_ready(last)))

    def _replays(self, program: Any) -> float:
        token, passed, times = jnp.zeros((), jnp.int32), ctypes.c_float(), []
        for _ in range(REPLAYS + 10):  # ten to let the clocks rise
            jax.block_until_ready(program(token, self._weights, *self._inputs))
            self._clock.cuda("cuEventElapsedTime", ctypes.byref(passed), *self._clock._events[0])
            times.append(passed.value * 1e3)
        return statistics.median(times[-REPLAYS:])


def launches(compiled: Any) -> int:
    """Instructions of an optimised program that launch kernels (or calls of libraries)."""
    return len(re.findall(r" (?:fusion|custom-call|convolution|dot)\(", compiled.as_text()))


class Jax(Peer):
    """XLA through ``jax.jit``."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        jax.config.update("jax_default_matmul_precision", "highest")
        self.clock = None
        if context.device == "cuda":
            if jax.default_backend() != "gpu":
                raise ImportError("this JAX has no GPU backend")
            jax.block_until_ready(jnp.zeros(1))
            make_current()
            self.clock = CudaClock()
            marks = build_marks(context.work)
            jax.ffi.register_ffi_target(
                "benchmark_mark", jax.ffi.pycapsule(marks.mark), platform="CUDA"
            )

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "jaxlib": jax.lib.__version__}

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        if row not in FORMULAS:
            raise LookupError(f"{row} is not written in JAX")
        last = ROWS[row].image and dtype != "float32"
        layout = "NHWC" if last else "NCHW"
        with np.load(self.context.folder(row, dtype) / "weights.npz") as file:
            weights = {k: jnp.asarray(v, dtype) for k, v in file.items() if v.dtype.kind == "f"}
        inputs = [jnp.asarray(x) for x in self.context.inputs(row, dtype)]
        if last:
            inputs = [x.transpose(0, 2, 3, 1) for x in inputs]

        def function(weights: Any, *inputs: Any) -> Any:
            return FORMULAS[row](weights, layout, *inputs)

        return JaxReady(function, weights, inputs, last, self), {}


def make_current() -> None:
    """Make the device's primary context current in this thread: JAX keeps it to its own threads."""
    from cuda_driver import Driver

    driver = Driver()
    driver("cuInit", 0)
    device = ctypes.c_int()
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", device))
