"""JAX: the rows compiled by XLA, replayed as CUDA graphs like everyone else.

XLA runs on a stream of its own, and merges equal copies within one program. So the program holds one
copy between two custom calls (``jax_mark.cc``), of which the first copies weights and inputs and begins
to capture XLA's stream, and the second ends it. The graph that the protocol replays holds the captured
one 20 times in a chain. XLA's own graphs ("command buffers") are off: they cannot be captured.

XLA frees a program's temporary memory when it ends, and the captured kernels still use it. So a row is
captured anew for each measurement, and nothing else runs in this process until its graphs are destroyed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Read when JAX starts: no graphs by XLA itself, and no pool of most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import numpy as np
from protocol import COPIES, CudaClock, Times, call_time, cpu_times
from rows import ROWS

from .base import Context, Peer, Ready, gpu_alone
from .jax_rows import FORMULAS, arranged_weights

_SOURCE = Path(__file__).with_name("jax_mark.cc")


def build_marks(folder: Path, *, host: bool = False) -> ctypes.CDLL:
    """Compile the custom calls, load them, and make them known to JAX.

    Parameters
    ----------
    folder : Path
        Where the library is written.
    host : bool
        For XLA on a CPU, where nothing is captured.

    Raises
    ------
    RuntimeError
        If the compiler rejects them.
    """
    library = folder / f"jax_mark-{os.getpid()}.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{jax.ffi.include_dir()}", str(_SOURCE),
               "-o", str(library), "-ldl", *(["-DMARK_HOST"] if host else [])]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["?"]
        raise RuntimeError(f"the custom calls do not compile: {lines[0]}")
    marks = ctypes.CDLL(str(library))
    marks.take.restype = ctypes.c_void_p
    for name in ("begin", "end"):
        handler = jax.ffi.pycapsule(getattr(marks, f"mark_{name}"))
        jax.ffi.register_ffi_target(
            f"benchmark_{name}", handler, platform="cpu" if host else "CUDA"
        )
    return marks


def marked(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The function between the two marks; it returns a token of the second mark too.

    Everything that the function reads is a result of the first mark, and the second mark takes all of
    that again, beside the function's results: no memory of an input is used for something else.
    """

    def program(*arguments: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        held = jax.ffi.ffi_call("benchmark_begin", shapes, has_side_effect=True)(*leaves)
        out = function(*jax.tree.unflatten(tree, held))
        token = jax.ShapeDtypeStruct((), jnp.int32)
        end = jax.ffi.ffi_call("benchmark_end", token, has_side_effect=True)
        return end(*jax.tree.leaves(out), *held), out

    return program


class JaxReady(Ready):
    """A function of a weight dictionary and inputs, compiled by XLA."""

    def __init__(
        self, function: Callable[..., Any], weights: Any, inputs: list[Any], last: bool, peer: Jax
    ) -> None:
        self._arguments, self._last = (weights, *inputs), last
        self._clock, self._marks = peer.clock, peer.marks
        self.nodes: int | None = None
        with gpu_alone(peer.context):  # XLA times candidates now; the second finds what it chose
            self._single = jax.jit(function).lower(*self._arguments).compile()
            jax.block_until_ready(self.call())
            if self._clock is not None:
                self._program = jax.jit(marked(function)).lower(*self._arguments).compile()
                jax.block_until_ready(self._program(*self._arguments))  # loads its kernels

    def call(self) -> Any:
        return self._single(*self._arguments)

    @contextlib.contextmanager
    def _captured(self) -> Iterator[tuple[list[Any], Sequence[Any]]]:
        """Capture a run: graphs of 20 copies and of one, and the arrays that they write.

        Raises
        ------
        RuntimeError
            If nothing was captured.
        """
        clock = self._clock
        self._marks.arm()
        token, out = self._program(*self._arguments)
        jax.block_until_ready((token, out))
        graph = ctypes.c_void_p(self._marks.take())
        if not graph.value or not (nodes := clock.nodes(graph)):
            raise RuntimeError("nothing of XLA's program was captured")
        self.nodes = nodes
        graphs = [clock.chain(graph, copies) for copies in (COPIES, 1)]
        try:
            yield graphs, jax.tree.leaves(out)
        finally:
            clock.sync()
            for each in graphs:
                clock.destroy(each)
            clock.cuda("cuGraphDestroy", graph)

    def outputs(self) -> list[np.ndarray]:
        if self._clock is None:
            return self._arrays(jax.tree.leaves(self.call()))
        for which in (0, 1):
            with self._captured() as (graphs, out):
                for array in out:  # what is not written must not look right
                    self._clock.fill(array.unsafe_buffer_pointer(), array.nbytes)
                self._clock.launch(graphs[which])
                self._clock.sync()
                found = self._arrays(out)
            if not all(np.isfinite(a).all() for a in found):
                break
        return found

    def _arrays(self, out: Sequence[Any]) -> list[np.ndarray]:
        arrays = [np.asarray(a) for a in out]
        return [a.transpose(0, 3, 1, 2) if self._last and a.ndim == 4 else a for a in arrays]

    def measure(self) -> Times:
        if self._clock is None:
            return cpu_times(lambda: jax.block_until_ready(self.call()))
        clock = self._clock
        with self._captured() as ((many, one), _):
            warm = statistics.median(clock.replays(lambda: clock.launch(many), cold=False))
            cold = statistics.median(clock.replays(lambda: clock.launch(one), cold=True))
        last: list[Any] = []

        def call() -> None:
            last[:] = [self.call()]

        return Times(warm / COPIES, cold, call_time(call, lambda: jax.block_until_ready(last)))


class Jax(Peer):
    """XLA through ``jax.jit``."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        jax.config.update("jax_default_matmul_precision", "highest")
        self.clock = self.marks = None
        if context.device == "cuda":
            if jax.default_backend() != "gpu":
                raise ImportError("this JAX has no GPU backend")
            jax.block_until_ready(jnp.zeros(1))
            make_current()
            self.clock = CudaClock()
            self.marks = build_marks(context.work)

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "jaxlib": jax.lib.__version__}

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        if row not in FORMULAS:
            raise LookupError(f"{row} is not written in JAX")
        last = ROWS[row].image and dtype != "float32"
        layout = "NHWC" if last else "NCHW"
        with np.load(self.context.folder(row, dtype) / "weights.npz") as file:
            weights = {k: jnp.asarray(v, dtype) for k, v in arranged_weights(file, layout).items()}
        inputs = [jnp.asarray(x) for x in self.context.inputs(row, dtype)]
        if last:
            inputs = [x.transpose(0, 2, 3, 1) for x in inputs]

        def function(weights: Any, *inputs: Any) -> Any:
            return FORMULAS[row](weights, layout, *inputs)

        return JaxReady(function, weights, inputs, last, self), {}

    def prepare(self, row: str, dtype: str) -> dict[str, Any]:
        about = super().prepare(row, dtype)
        nodes = self.ready[row, dtype].nodes
        return about if nodes is None else {**about, "launches": nodes}


def make_current() -> None:
    """Make the device's primary context current in this thread: JAX keeps it to its own threads."""
    from cuda_driver import Driver

    driver = Driver()
    driver("cuInit", 0)
    device = ctypes.c_int()
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", device))
