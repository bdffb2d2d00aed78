"""PyTorch: eager, compiled by Inductor in several ways, and hand-merged by an expert."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from experts import expert
from protocol import COPIES, CudaClock, Times, cpu_times
from torch_rows import Workload, build, outputs_of, place

from .base import Context, Peer, Ready, gpu_alone


class TorchReady(Ready):
    """A callable on tensors, captured by PyTorch and replayed by the protocol's clock."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], clock: Any, stream: Any
    ) -> None:
        self._function, self._inputs = function, inputs
        self._clock, self._stream = clock, stream
        self._graphs: list[Any] = []
        if clock is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.call()
            torch.cuda.synchronize()
            self._graphs = [self._captured(copies) for copies in (COPIES, 1)]

    def call(self) -> Any:
        with torch.no_grad():
            return self._function(*self._inputs)

    def _captured(self, copies: int) -> tuple[Any, Any, Any]:
        """Capture some calls; return PyTorch's graph, a launchable one, and the last outputs."""
        try:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
        except TypeError:  # an older PyTorch gives no access to the graph
            graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
            out = None
            for _ in range(copies):
                out = None  # the next copy writes to the same buffers
                out = self.call()
        try:
            executable = self._clock.instantiate(ctypes.c_void_p(graph.raw_cuda_graph()))
        except (AttributeError, RuntimeError):
            executable = None
            if hasattr(graph, "instantiate"):
                graph.instantiate()
        return graph, executable, out

    def _launcher(self, which: int) -> Callable[[], None]:
        graph, executable, _ = self._graphs[which]
        if executable is not None:
            return lambda: self._clock.launch(executable)

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def outputs(self) -> list[np.ndarray]:
        if not self._graphs:
            return [t.numpy() for t in outputs_of(self.call())]
        for which in (0, 1):
            self._spoil(which)
            tensors = outputs_of(self._graphs[which][2])
            for tensor in tensors:
                tensor.fill_(float("nan"))  # what is not written must not look right
            torch.cuda.synchronize()
            self._launcher(which)()
            self._clock.sync()
            if which == 0 and not all(bool(torch.isfinite(t).all()) for t in tensors):
                break
        return [t.cpu().numpy() for t in tensors]

    def _spoil(self, which: int) -> None:
        """Run on NaN, so that what a kernel reads before it is written is not what an earlier run wrote."""
        kept = [tensor.clone() for tensor in self._inputs]
        for tensor in self._inputs:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        self._launcher(which)()
        self._clock.sync()
        for tensor, values in zip(self._inputs, kept, strict=True):
            tensor.copy_(values)

    def measure(self) -> Times:
        if not self._graphs:
            return cpu_times(self.call)
        with torch.cuda.stream(self._stream):
            return self._clock.measure(self._launcher(0), self._launcher(1), self.call)

    def close(self) -> None:
        for _, executable, _ in self._graphs:
            if executable is not None:
                self._clock.destroy(executable)
        self._graphs = []
        self._inputs = ()
        self._function = None  # type: ignore[assignment]
        gc.collect()


class TorchPeer(Peer):
    """What all contenders in PyTorch share: equal precision, cuDNN's own search, graphs."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        self.clock = self.stream = None
        if context.device == "cuda":
            torch.zeros(1, device="cuda")  # makes PyTorch's context current here
            self.stream = torch.cuda.Stream()
            self.clock = CudaClock(self.stream.cuda_stream)

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__}
        if self.context.device == "cuda":
            found["cuda"] = str(torch.version.cuda)
            found["cudnn"] = str(torch.backends.cudnn.version())
        return found

    def module(self, work: Workload) -> torch.nn.Module | None:
        """The module to run instead of the row's own."""
        return None

    def wrap(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Turn a placed module into what is called."""
        return module

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        work = build(row, dtype)
        module, inputs = place(work, self.context.device, self.module(work))
        function = self.wrap(module)
        with torch.no_grad():
            function(*inputs)  # compilers compile now
        with gpu_alone(self.context):
            return TorchReady(function, inputs, self.clock, self.stream), {}


class Eager(TorchPeer):
    """PyTorch as it is."""

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        with gpu_alone(self.context):  # cuDNN chooses by timing at the first call
            return super().make(row, dtype)


def configure_inductor(context: Context, settings: dict[str, Any]) -> None:
    """Set Inductor's options for this process, and let it time kernels only when it is alone.

    Raises
    ------
    AttributeError
        If this PyTorch has no such option.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    from torch._inductor.runtime import benchmarking

    for name, value in settings.items():
        if not hasattr(inductor, name):
            raise AttributeError(f"this PyTorch's Inductor has no option {name}")
        setattr(inductor, name, value)
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(dynamo, name):
            setattr(dynamo, name, 256)  # one module class serves many rows
    chosen = benchmarking.benchmarker
    for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
        if hasattr(chosen, name):
            _lock_method(chosen, name, context)


def _lock_method(owner: Any, name: str, context: Context) -> None:
    real = getattr(owner, name)

    def alone(*args: Any, **kwargs: Any) -> Any:
        with gpu_alone(context):
            return real(*args, **kwargs)

    setattr(owner, name, alone)


class Compiled(TorchPeer):
    """``torch.compile`` with options of Inductor."""

    def __init__(self, context: Context, settings: dict[str, Any]) -> None:
        super().__init__(context)
        configure_inductor(context, settings)

    def wrap(self, module: torch.nn.Module) -> Callable[..., Any]:
        return torch.compile(module, dynamic=False)


class Expert(Eager):
    """The hand-merged version as it is."""

    def module(self, work: Workload) -> torch.nn.Module | None:
        return expert(work)


class CompiledExpert(Compiled):
    """The hand-merged version, compiled."""

    def module(self, work: Workload) -> torch.nn.Module | None:
        return expert(work)


def ceilings() -> dict[str, float]:
    """Rates of a large device copy (bytes/s) and of large products (FLOP/s), by PyTorch."""

    def seconds(work: Callable[[], Any], repeat: int = 10) -> float:
        for _ in range(3):
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeat

    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    found = {"copy": 2 * a.numel() / seconds(functools.partial(b.copy_, a))}
    del a, b
    for dtype, size in (("float16", 8192), ("float32", 4096)):
        x = torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype))
        found[dtype] = 2 * size**3 / seconds(functools.partial(torch.mm, x, x))
    torch.cuda.empty_cache()
    return {k: float(f"{v:.4g}") for k, v in found.items()}
