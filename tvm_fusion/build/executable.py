"""Compiled models as callables."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compat import Target, relax, tvm
from ..errors import TargetError
from ..planner.plan import Plan
from ..targets import parse_target, runs_here
from .cuda_driver import CudaDriver, driver_of
from .cuda_source import device_sources
from .graph_runner import GraphRunner
from .library import export_library, load_library
from .machine_code import cubins_of
from .program import NotStaticError
from .ptxas import has_nvcc
from .signature import Signature, signature_in
from .vm_runner import VmRunner

#: Definition (or declaration) of a kernel in CUDA source.
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")


class LoadedModel:
    """A compiled model, ready to run. See ``docs/running.md``.

    Several threads may call it; they take turns.

    Parameters
    ----------
    library : tvm.runtime.Module or VMExecutable
        The compiled code.
    signature : Signature
        Its inputs and outputs.
    function : str
        Name of the function to run.
    cuda_graph : bool
        Whether to run a model for CUDA by replaying a CUDA graph of its kernels, rather than by
        TVM's VM.
    """

    def __init__(
        self,
        library: Any,
        signature: Signature,
        function: str = "main",
        *,
        cuda_graph: bool = True,
    ) -> None:
        self.signature = signature
        self._library = library
        self._function = function
        self._cuda_graph = cuda_graph
        self._lock = threading.RLock()
        self._runner: Any = None
        #: Serves `launch` where calls do not use graphs.
        self._launcher: GraphRunner | None = None
        self._machine: Any = None

    @property
    def cuda_graph(self) -> bool:
        """Whether calls replay a CUDA graph; False once that has turned out to be impossible."""
        return self._cuda_graph

    @cuda_graph.setter
    def cuda_graph(self, value: bool) -> None:
        with self._lock:
            self._cuda_graph, self._runner = value, None

    def __call__(self, *arrays: Any) -> list[Any]:
        """Run the model.

        Parameters
        ----------
        *arrays : array_like or DLPack tensor
            One per input, in order, of the input's shape and dtype (see ``signature``), all of one
            framework (NumPy, PyTorch, CuPy, TVM, or any other with DLPack) and all on the host or
            all on the model's device.

        Returns
        -------
        list
            The outputs in order, of the same framework and in the same place; TVM's tensors for
            other frameworks with DLPack. Results on a GPU of PyTorch, CuPy and TVM come before they
            are computed: work on the framework's current stream, on which the model runs, comes
            after them. A result does not change as long as the caller holds it.

        Raises
        ------
        TypeError, ValueError
            If an array has another dtype or shape than the input, or there are too many or too few.
        TargetError
            If the model needs a GPU that this machine lacks.
        """
        runner = self._runner or self._start()
        try:
            return runner(arrays)
        except NotStaticError as err:
            return self._without_graph(err)(arrays)

    def launch(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None = None,
        *,
        stream: int | None = None,
    ) -> list[Any]:
        """Launch the model's kernels one by one, without a graph, a copy or waiting.

        For a caller that captures graphs himself. After the first call nothing is allocated. The
        intermediate results are in memory that all calls share: what is captured here must not run
        at the same time as another call.

        Parameters
        ----------
        inputs : sequence of DLPack tensors
            One per input, on the GPU, contiguous and aligned to 64 bytes.
        outputs : sequence of DLPack tensors, optional
            Where the results go, likewise; memory of the model's own if absent, which later calls
            overwrite.
        stream : int, optional
            Handle of the CUDA stream; the current one of the tensors' framework if absent.

        Returns
        -------
        list
            The outputs.

        Raises
        ------
        NotStaticError
            If the model's calls are not the same every time, or it is for a CPU.
        TypeError, ValueError
            If a tensor does not fit.
        """
        with self._lock:
            runner = self._runner or self._start()
            if not isinstance(runner, GraphRunner):
                if not is_cuda(device_for_run(parse_target(self.signature.target))):
                    raise NotStaticError("launch is for models that are compiled for CUDA")
                runner = self._launcher = self._launcher or self._graph_runner()
        return runner.launch(inputs, outputs, stream)

    def _start(self) -> Any:
        """Load the code and choose how to run it."""
        with self._lock:
            if self._runner is None:
                device = device_for_run(parse_target(self.signature.target))
                if not is_cuda(device):
                    self._runner = self._vm_runner(device, None)
                elif not self._cuda_graph:
                    self._runner = self._vm_runner(device, driver_of(device.index))
                else:
                    try:
                        self._runner = self._graph_runner()
                    except NotStaticError as err:
                        self._without_graph(err)
            return self._runner

    def _without_graph(self, why: NotStaticError) -> Any:
        """Say why there is no graph, once, and go on with TVM's VM."""
        with self._lock:
            if self._cuda_graph:
                warnings.warn(
                    f"the model runs without a CUDA graph: {why}", RuntimeWarning, stacklevel=3
                )
            self.cuda_graph = False
            return self._start()

    def _graph_runner(self) -> GraphRunner:
        device = device_for_run(parse_target(self.signature.target))
        module = getattr(self._library, "mod", self._library)
        return GraphRunner(
            functools.partial(self._vm, device), self.signature, self._function, device,
            driver_of(device.index), lambda name: module.implements_function(name, True),
        )  # fmt: skip

    def _vm_runner(self, device: Any, driver: CudaDriver | None) -> VmRunner:
        return VmRunner(self._vm(device), self.signature, self._function, device, driver)

    def _vm(self, device: Any) -> Any:
        if self._machine is None:
            self._machine = relax.VirtualMachine(self._library, device)
        return self._machine

    def time(self, *arrays: Any, number: int = 1, repeat: int = 3) -> list[float]:
        """Time the model.

        Parameters
        ----------
        *arrays : array_like
            The inputs.
        number, repeat : int
            Calls per measurement, and measurements.

        Returns
        -------
        list of float
            Seconds per call of each measurement: replays of the graph on the GPU's clock, or, where
            there is none, calls of TVM's VM.
        """
        runner = self._runner or self._start()
        try:
            return runner.time(arrays, number, repeat)
        except NotStaticError as err:
            return self._without_graph(err).time(arrays, number, repeat)


class CompiledModel(LoadedModel):
    """A model that was just compiled, with its plan.

    Attributes
    ----------
    plan : Plan
        The plan that was carried out (groups that failed are gone from it, with the reason).
    kernels : dict of str to str
        Name of the kernel that serves each group.
    """

    def __init__(
        self,
        executable: Any,
        signature: Signature,
        plan: Plan,
        kernels: dict[str, str],
        target: Any,
    ) -> None:
        super().__init__(executable, signature)
        self.plan = plan
        self.kernels = kernels
        self.target = target

    def export(self, path: str | Path) -> None:
        """Write a shared library that plain TVM runs, without this package.

        On a machine without a GPU, TVM leaves CUDA code in the library as source. Its machine code is
        added if nvcc is installed, so that `load` needs no compiler; plain TVM compiles the source
        again.

        Parameters
        ----------
        path : str or Path
            The file, as ``model.so``; one of this name is replaced.

        Raises
        ------
        OSError
            If the file cannot be written there.
        CompilerError
            If the linker or nvcc fails.
        """
        sources = self.cuda_sources() if has_nvcc() and not tvm.cuda(0).exist else []
        arch = str(self.target.attrs["arch"]) if sources else ""
        export_library(self._library, path, cubins_of(sources, arch), arch)

    def cuda_sources(self) -> list[str]:
        """CUDA source text of each device module (empty for a CPU model)."""
        return device_sources(self._library.mod)

    def cuda_kernels(self) -> list[str]:
        """Names of the kernels in those sources, in order."""
        found = (_KERNEL.findall(source) for source in self.cuda_sources())
        return list(dict.fromkeys(name for names in found for name in names))


def device_for_run(target: Target) -> Any:
    """Return the device to run a compiled model on.

    Raises
    ------
    TargetError
        If this machine cannot run it: it has no GPU, or another CPU.
    """
    if not runs_here(target):
        what = "CUDA and this machine has no GPU" if target.kind.name == "cuda" else "another CPU"
        raise TargetError(f"the model is compiled for {what}; compile it for llvm to run it here")
    return tvm.cuda(0) if target.kind.name == "cuda" else tvm.cpu()


def is_cuda(device: Any) -> bool:
    """Whether a device is a GPU of CUDA."""
    return device.dlpack_device_type() == tvm.cuda(0).dlpack_device_type()


def load(path: str | Path, *, cuda_graph: bool = True) -> LoadedModel:
    """Load a library that `CompiledModel.export` wrote.

    Parameters
    ----------
    path : str or Path
        The library.
    cuda_graph : bool
        Whether to run a model for CUDA by replaying a CUDA graph of its kernels, rather than by
        TVM's VM.

    Returns
    -------
    LoadedModel
        Callable on DLPack tensors and NumPy arrays.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    InvalidModelError
        If the file is not such a library.
    """
    library = load_library(path)
    return LoadedModel(library, signature_in(library, str(path)), cuda_graph=cuda_graph)
