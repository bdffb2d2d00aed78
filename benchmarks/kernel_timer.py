"""Build one PrimFunc alone and time it: on CUDA through a CUDA graph, on a CPU by TVM's evaluator.

A CUDA graph of many launches of one kernel shows what the kernel takes on the device, its launch
inside a graph included, without the host's speed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from cuda_driver import Driver

from tvm_fusion.build.executable import device_sources
from tvm_fusion.build.inputs import numpy_dtype

_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")

#: Bytes to which arguments are aligned; TVM promises its kernels less.
_ALIGN = 256
#: Largest graph: nodes of a warm measurement, and argument sets of a cold one.
_MAX_NODES, _MAX_SETS = 400, 1000


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of one argument of a kernel."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up to the alignment."""
        size = int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize
        return -(-max(size, 1) // _ALIGN) * _ALIGN


def specs_of(func: Any) -> list[Spec]:
    """Return the arguments of a PrimFunc of static shape."""
    return [Spec(tuple(int(d) for d in p.ty.shape), str(p.ty.dtype)) for p in func.params]


@dataclasses.dataclass
class Built:
    """A compiled kernel with its CUDA source, cubin and device kernels (none of these on a CPU)."""

    executable: Any
    source: str
    cubin: bytes | None
    names: list[str]


def build(func: Any, target: Any) -> Built:
    """Compile a scheduled PrimFunc alone, as ``tvm_fusion`` compiles it inside a model."""
    kept: list[bytes] = []
    if target.kind.name == "cuda":
        from tvm.support import nvcc

        def compile_and_keep(code: str) -> bytes:
            kept.append(bytes(nvcc.tvm_callback_cuda_compile(code)))
            return kept[-1]

        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_and_keep, override=True)
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
        executable = tvm.compile(module, target=target)
    source = "\n".join(device_sources(executable.mod))
    return Built(
        executable, source, kept[-1] if kept else None, sorted(set(_KERNEL.findall(source)))
    )


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class RawTensor:
    """Memory at an address, for DLPack: TVM's own views have an offset, which its kernels refuse."""

    def __init__(self, address: int, spec: Spec, device: tuple[int, int]) -> None:
        name = spec.dtype
        code = {"i": 0, "u": 1, "f": 2, "b": 4 if name == "bfloat16" else 6}[name[0]]
        bits = 8 if name == "bool" else int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        self._shape = (ctypes.c_int64 * max(len(spec.shape), 1))(*spec.shape)
        self._device = device
        self._tensor = _DLTensor(
            address, *device, len(spec.shape), code, bits, 1, self._shape, None, 0, None, None
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


class CudaTimer:
    """Times kernels on GPU 0.

    Parameters
    ----------
    seed : int
        Seed of the arguments' random values.
    """

    def __init__(self, seed: int = 0) -> None:
        self.device = tvm.cuda(0)
        self.place = (2, 0)  # the same for DLPack
        tvm.runtime.empty((1,), "float32", self.device)  # makes TVM's context current here
        self.cuda = Driver()
        self.stream = self.cuda.handle("cuStreamCreate", 1)
        self.events = [self.cuda.handle("cuEventCreate", 0) for _ in range(2)]
        self._pools: dict[str, tuple[int, int]] = {}
        self._rng = np.random.default_rng(seed)
        size = ctypes.c_int()
        self.cuda("cuDeviceGetAttribute", ctypes.byref(size), 38, 0)  # L2_CACHE_SIZE
        self.cache_bytes = size.value

    def resources(self, built: Built) -> dict[str, int]:
        """Registers, local and static shared bytes (the largest of the module's kernels)."""
        if built.cubin is None:
            return {}
        module = self.cuda.handle("cuModuleLoadData", built.cubin)
        out = {}
        for key, number in (("registers", 4), ("local_bytes", 3), ("shared_bytes", 1)):
            values = []
            for name in built.names:
                function = self.cuda.handle("cuModuleGetFunction", module, name.encode())
                value = ctypes.c_int()
                self.cuda("cuFuncGetAttribute", ctypes.byref(value), number, function)
                values.append(value.value)
            out[key] = max(values)
        self.cuda("cuModuleUnload", module)
        return out

    def arguments(self, specs: Sequence[Spec], outputs: int, sets: int) -> list[list[Any]]:
        """Make argument sets; the last ``outputs`` of each are written to, the others random."""
        cursors = {"out": 0}
        places: list[list[tuple[str, int]]] = []
        for _ in range(sets):
            row = []
            for i, spec in enumerate(specs):
                pool = "out" if i >= len(specs) - outputs else spec.dtype
                row.append((pool, cursors.get(pool, 0)))
                cursors[pool] = cursors.get(pool, 0) + spec.nbytes
            places.append(row)
        for pool, needed in cursors.items():
            self._reserve(pool, needed)
        return [
            [
                RawTensor(self._pools[pool][0] + offset, spec, self.place)
                for (pool, offset), spec in zip(row, specs, strict=True)
            ]
            for row in places
        ]

    def _reserve(self, pool: str, needed: int) -> None:
        """Make a pool large enough and fill it with random values."""
        if pool in self._pools:
            address, size = self._pools[pool]
            if size >= needed:
                return
            self.cuda("cuMemFree", ctypes.c_uint64(address))
        size = max(needed, 4 * self.cache_bytes)
        address = ctypes.c_uint64()
        self.cuda("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        self._pools[pool] = (address.value, size)
        if pool == "out":
            return
        block = self._random(pool, 1 << 20)
        for start in range(0, size, block.nbytes):
            length = min(block.nbytes, size - start)
            self.cuda(
                "cuMemcpyHtoD", ctypes.c_uint64(address.value + start),
                ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(length),
            )  # fmt: skip

    def _random(self, dtype: str, count: int) -> np.ndarray:
        kind = numpy_dtype(dtype)
        if kind.kind in "iub":
            return self._rng.integers(0, 2, count).astype(kind)
        return self._rng.standard_normal(count).astype(kind)

    def time(self, call: Callable[..., Any], sets: list[list[Any]], nodes: int = 0) -> float:
        """Median microseconds per launch; ``sets`` of arguments are used in turn.

        With one set everything that fits stays in the level-2 cache.
        """
        tensors = [[tvm_ffi.from_dlpack(a) for a in row] for row in sets]
        if not nodes:
            call(*tensors[0])  # loads the module, which a capture must not do
            self.device.sync()
            graph = self._graph(call, tensors[:1], 1)
            once = self._replay(graph, 3)
            self.cuda("cuGraphExecDestroy", graph)
            nodes = max(1, min(_MAX_NODES, int(1500 / max(once, 1e-3))))
        graph = self._graph(call, tensors, nodes)
        last = self._replay(graph, 3) / nodes
        for _ in range(8):  # the clock settles: until two medians agree
            now = self._replay(graph, 5) / nodes
            if abs(now - last) < 0.005 * last:
                break
            last = now
        self.cuda("cuGraphExecDestroy", graph)
        return now

    def cold_sets(self, specs: Sequence[Spec]) -> int:
        """Argument sets whose data is twice the level-2 cache; 0 if that takes too many."""
        sets = -(-2 * self.cache_bytes // sum(s.nbytes for s in specs))
        return sets if sets <= _MAX_SETS else 0

    def _graph(
        self, call: Callable[..., Any], tensors: list[list[Any]], nodes: int
    ) -> ctypes.c_void_p:
        self.cuda("cuStreamBeginCapture", self.stream, 2)  # 2: relaxed
        try:
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), self.stream.value):
                for i in range(nodes):
                    call(*tensors[i % len(tensors)])
        finally:
            graph = ctypes.c_void_p()
            self.cuda("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        executable = self.cuda.handle("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
        self.cuda("cuGraphDestroy", graph)
        return executable

    def _replay(self, graph: ctypes.c_void_p, repeat: int) -> float:
        """Median microseconds of one replay."""
        times = []
        for _ in range(repeat + 1):  # the first uploads the graph
            self.cuda("cuEventRecord", self.events[0], self.stream)
            self.cuda("cuGraphLaunch", graph, self.stream)
            self.cuda("cuEventRecord", self.events[1], self.stream)
            self.cuda("cuEventSynchronize", self.events[1])
            passed = ctypes.c_float()
            self.cuda("cuEventElapsedTime", ctypes.byref(passed), *self.events)
            times.append(passed.value * 1e3)
        return statistics.median(times[1:])


def random_arrays(specs: Sequence[Spec], seed: int = 0) -> list[Any]:
    """Random arguments on the CPU; integers are zero."""
    rng = np.random.default_rng(seed)
    arrays = []
    for spec in specs:
        is_float = spec.dtype.startswith(("float", "bfloat"))
        values = rng.standard_normal(spec.shape) if is_float else np.zeros(spec.shape)
        arrays.append(tvm.runtime.tensor(values.astype(numpy_dtype(spec.dtype))))
    return arrays


def time_with_evaluator(
    built: Built, arguments: Sequence[Any], device: Any, at_least: int
) -> float:
    """Median microseconds of back-to-back calls, by TVM's ``time_evaluator``.

    ``at_least`` is the length of each of three measurements in milliseconds.
    """
    evaluator = built.executable.mod.time_evaluator(
        "kernel", device, number=1, repeat=3, min_repeat_ms=at_least
    )
    return evaluator(*arguments).median * 1e6
