"""Time PyTorch's kernels as ours are timed: a CUDA graph of 20 copies on the same buffers (`protocol.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_COPIES, _REPLAYS, _WARM_UP = 20, 30, 5


def graph_time(run: Callable[[], Any]) -> tuple[float, Any]:
    """Median microseconds of a call, of 30 replays, and its result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            result = run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_COPIES):
                result = run()
        for _ in range(_WARM_UP):
            graph.replay()
        times = []
        for _ in range(_REPLAYS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
            graph.replay()
            last.record(stream)
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3 / _COPIES)
    return round(statistics.median(times), 3), result
