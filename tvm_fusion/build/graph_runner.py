"""A model run by replaying a CUDA graph of its kernels.

The kernel calls are recorded once (`program`), then captured for the buffers that they work on. A
graph has its addresses built in, so there is one per set of input buffers and set of output
buffers:

- Inputs are read in place. The buffers of the first call are captured at once, others when they
  come a second time; until then, and when all places are taken by buffers in use, inputs are copied
  into buffers of the model's own by one copy each, which takes about as long as one small kernel.
- Outputs belong to the caller as long as he holds them (or a view of them). A result still held
  when the next call comes stays as it is: that call writes to another set of buffers. When all sets
  are held, a result is copied to new memory.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..compat import relax, tvm
from .cuda_driver import Graph
from .frameworks import ALIGNMENT, NumpyArrays, as_tvm, framework_of, sort_out
from .program import BoundProgram, NotStaticError, Program, record, tensor_bytes
from .signature import Signature, TensorSpec
from .vm_runner import TURNS, counter
from .worker import Worker

#: Sets of input buffers that have graphs of their own, and sets of output buffers lent to callers.
INPUT_SETS, OUTPUT_SETS = 8, 4
#: A set of input buffers keeps its graphs for this many calls after its last.
KEEP_CALLS = 256
#: Buffers that came once and may come again.
_REMEMBERED = 32


class OutputSet:
    """Buffers for the outputs, lent to the caller.

    Parameters
    ----------
    tensors : sequence of tvm.runtime.Tensor
        The buffers.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)
        #: What callers get is a view of these, which nothing else holds.
        self.lent = [t._create_view(t.shape, t.dtype) for t in tensors]
        self._counters = [counter(t) for t in self.lent]

    def is_free(self) -> bool:
        """Whether no caller holds an output, or a view of one."""
        for count in self._counters:  # a loop: every call asks, and a generator takes longer
            if count.value != 1:
                return False
        return True


@dataclasses.dataclass
class _Entry:
    """Graphs of one set of input buffers, by number of the set of outputs."""

    graphs: dict[int, Graph] = dataclasses.field(default_factory=dict)
    last_call: int = 0


class GraphRunner:
    """Replays CUDA graphs.

    Parameters
    ----------
    load : callable
        Returns the model in TVM's VM.
    signature : Signature
        Its inputs and outputs, of static shapes.
    function : str
        Name of its function.
    device : Device
        Where it runs.
    driver : CudaDriver
        The driver, or what stands in its place in a test.
    owns : callable
        Whether the library itself holds the kernel of a name.

    Raises
    ------
    NotStaticError
        If the model's calls cannot be recorded.
    """

    def __init__(
        self,
        load: Callable[[], relax.VirtualMachine],
        signature: Signature,
        function: str,
        device: Any,
        driver: Any,
        owns: Callable[[str], bool],
    ) -> None:
        if not all(isinstance(d, int) for spec in signature.inputs for d in spec.shape):
            raise NotStaticError("an input has a symbolic shape")
        self._specs, self._device, self._driver = signature, device, driver
        self._lock = threading.Lock()
        self._frameworks: dict[type, NumpyArrays] = {}
        #: For the outputs that `launch` gets.
        self._targets: dict[type, NumpyArrays] = {}
        self._worker = Worker(driver.enter_worker)
        self._stream = self._worker.run(driver.create_stream)
        #: Stream of the last call; work on another one waits for it, because they share buffers.
        self._last: int | None = None
        self._calls = 0
        #: Graphs by addresses of the inputs; those of the model's own input buffers under None.
        self._entries: collections.OrderedDict[Any, _Entry] = collections.OrderedDict()
        self._entries[None] = _Entry()
        self._seen: collections.OrderedDict[Any, None] = collections.OrderedDict()
        self._bound: collections.OrderedDict[Any, BoundProgram] = collections.OrderedDict()
        #: Set 0 is the model's own, the others are lent.
        self._sets: list[OutputSet] = []
        self._kept: list[Any] = []
        self._program: Program = self._worker.run(lambda: self._record(load(), function, owns))
        # Before the memory goes back to TVM's pool, nothing may use it any more. On the worker,
        # because waiting on this thread might spoil a capture.
        weakref.finalize(self, self._worker.run, driver.synchronize_all).atexit = False

    def _record(
        self, vm: relax.VirtualMachine, function: str, owns: Callable[[str], bool]
    ) -> Program:
        """Run the model once on zeros, on the worker: it loads the kernels and takes its memory."""
        driver, stream = self._driver, self._stream
        self._inputs = [self._new(spec) for spec in self._specs.inputs]
        driver.synchronize(0)  # TVM copies the weights on the default stream, which ours ignores
        with TURNS.take(driver, stream):
            for tensor in self._inputs:
                driver.clear(tensor.data_ptr(), tensor_bytes(tensor), stream)
            program = record(vm, function, self._inputs, owns)
            driver.synchronize(stream)
        own = [
            program.outputs[i].tensor if program.writes(i) else self._new(spec)
            for i, spec in enumerate(self._specs.outputs)
        ]
        self._sets.append(OutputSet(own))
        return program

    def _new(self, spec: TensorSpec) -> Any:
        return tvm.runtime.empty(spec.shape, spec.dtype, self._device)

    # ---------------------------------------------------------------- calls

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run the model; see ``LoadedModel.__call__``."""
        with self._lock:
            framework = self._frameworks.get(type(values[0])) if values else None
            if framework is not None:  # the quick way: everything is known from earlier calls
                pointers = framework.pointers(values)
                entry = self._entries.get(pointers) if pointers is not None else None
                stream = framework.stream()
                if entry is not None and stream == self._last:
                    number = self._free_set()
                    graph = entry.graphs.get(number)
                    if graph is not None and number and not self._is_captured(stream):
                        self._calls = entry.last_call = self._calls + 1
                        self._driver.launch(graph, stream)
                        return self._lend(framework, number, stream)
            return self._call(values)

    def _call(self, values: Sequence[Any]) -> list[Any]:
        """Run the model whatever the tensors are."""
        self._calls += 1
        framework = self._framework(values)
        values, on_device = sort_out(framework, self._specs.inputs, values)
        if not on_device:
            return self._call_from_host(framework, values)
        stream = framework.stream()
        if self._is_captured(stream):
            return self._call_in_capture(framework, values, stream)
        self._wait(stream)
        number = self._free_set()
        pointers = framework.pointers(values)
        entry = self._entry(pointers)
        if entry is self._entries[None]:
            held = [as_tvm(framework, v, alignment=1) for v in values]
            self._copy_all(self._inputs, held, stream)
            graph = self._graph(entry, self._inputs, number)
        else:
            graph = self._graph(entry, [framework.to_tvm(v) for v in values], number)
        self._driver.launch(graph, stream)
        return self._lend(framework, number, stream)

    def _call_from_host(self, framework: NumpyArrays, values: Sequence[Any]) -> list[Any]:
        """Copy inputs to the device, wait, and copy outputs back."""
        self._wait(self._stream)
        self._driver.synchronize(self._stream)  # an earlier call may still read the inputs
        for own, value in zip(self._inputs, values, strict=True):
            framework.upload(value, own)
        self._driver.synchronize(0)  # where TVM copies
        graph = self._graph(self._entries[None], self._inputs, 0)
        self._driver.launch(graph, self._stream)
        self._driver.synchronize(self._stream)
        self._last = None
        return [framework.from_tvm(t.copyto(tvm.cpu())) for t in self._sets[0].tensors]

    def _call_in_capture(
        self, framework: NumpyArrays, values: Sequence[Any], stream: int
    ) -> list[Any]:
        """Launch the kernels into the caller's own capture.

        His graph will be replayed without our knowledge: it gets memory that is never used again,
        and is kept as long as this object.
        """
        inputs = [as_tvm(framework, v) for v in values]

        def launch() -> list[Any]:
            outputs = [self._new(spec) for spec in self._specs.outputs]
            bound = self._program.bind(inputs, outputs, private=self._device)
            self._run(bound, stream)
            self._kept.append(bound)
            return outputs

        return [framework.from_tvm(t) for t in self._worker.run(launch)]

    def _lend(self, framework: NumpyArrays, number: int, stream: int) -> list[Any]:
        """Hand out the outputs of a set, or copies of the model's own."""
        chosen = self._sets[number]
        if number:
            tensors = chosen.lent
        else:
            tensors = [framework.empty(s.shape, s.dtype) for s in self._specs.outputs]
            self._copy_all(tensors, chosen.tensors, stream)
        if not framework.asynchronous:
            self._driver.synchronize(stream)
        from_tvm = framework.from_tvm
        return [from_tvm(t) for t in tensors]

    def _free_set(self) -> int:
        """Number of a set of outputs that nobody holds, made if there may be one more; else 0."""
        for number, outputs in enumerate(self._sets):
            if number and outputs.is_free():
                return number
        if len(self._sets) > OUTPUT_SETS:
            return 0
        made = self._worker.run(lambda: [self._new(s) for s in self._specs.outputs])
        self._sets.append(OutputSet(made))
        return len(self._sets) - 1

    def _is_captured(self, stream: int) -> bool:
        # Stream 0 cannot be captured, and asking about it may fail while others are.
        return bool(stream) and self._driver.is_capturing(stream)

    def _wait(self, stream: int) -> None:
        if self._last is not None and self._last != stream:
            self._driver.order(self._last, stream)
        self._last = stream

    def _copy_all(self, targets: Sequence[Any], sources: Sequence[Any], stream: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            if size := tensor_bytes(target):
                self._driver.copy(target.data_ptr(), source.data_ptr(), size, stream)

    def _framework(self, values: Sequence[Any]) -> NumpyArrays:
        kind = type(values[0]) if values else type(None)
        if kind not in self._frameworks:
            made = (framework_of(kind) if values else NumpyArrays)(self._specs.inputs, self._device)
            self._frameworks[kind] = made
        return self._frameworks[kind]

    # --------------------------------------------------------------- graphs

    def _entry(self, pointers: tuple[int, ...] | None) -> _Entry:
        """Graphs of some input buffers; those of the model's own if these have none (yet)."""
        entry = self._entries.get(pointers)
        if entry is None:
            known = len(self._entries) == 1 or pointers in self._seen
            if known and self._make_room():
                self._seen.pop(pointers, None)
                entry = self._entries[pointers] = _Entry()
            else:
                self._seen[pointers] = None
                if len(self._seen) > _REMEMBERED:
                    self._seen.popitem(last=False)
                entry = self._entries[None]
        entry.last_call = self._calls
        return entry

    def _make_room(self) -> bool:
        """Whether one more set of input buffers may have graphs; the longest unused one goes."""
        if len(self._entries) <= INPUT_SETS:
            return True
        oldest = min((k for k in self._entries if k), key=lambda k: self._entries[k].last_call)
        if self._entries[oldest].last_call > self._calls - KEEP_CALLS:
            return False
        del self._entries[oldest]
        return True

    def _graph(self, entry: _Entry, inputs: Sequence[Any], number: int) -> Graph:
        """Graph for some inputs and a set of outputs, captured if there is none."""
        graph = entry.graphs.get(number)
        if graph is None:
            bound = self._program.bind(inputs, self._sets[number].tensors)
            graph = entry.graphs[number] = self._worker.run(lambda: self._capture(bound))
        return graph

    def _capture(self, bound: BoundProgram) -> Graph:
        driver, stream = self._driver, self._stream

        def run() -> None:
            bound.run(lambda *what: driver.copy(*what, stream))

        try:
            return driver.capture(run, stream, len(bound.calls))
        except (tvm.error.InternalError, RuntimeError, TypeError, ValueError) as err:
            reason = (str(err).strip().splitlines() or [type(err).__name__])[-1]
            raise NotStaticError(f"its kernels cannot be captured: {reason}") from err

    def _run(self, bound: BoundProgram, stream: int) -> None:
        """Launch kernels without a graph."""
        with self._driver.use(stream):
            bound.run(lambda *what: self._driver.copy(*what, stream))

    # ------------------------------------------------------- without a graph

    def launch(
        self, values: Sequence[Any], outputs: Sequence[Any] | None, stream: int | None
    ) -> list[Any]:
        """Launch the kernels once; see ``LoadedModel.launch``."""
        with self._lock:
            framework = self._framework(values)
            where = framework.stream() if stream is None else stream
            bound = self._bind(framework, values, outputs)
            if self._is_captured(where):
                self._run(bound, where)
            else:
                self._wait(where)
                self._run(bound, where)
                if stream is not None:  # it may be destroyed before the next call
                    self._wait(self._stream)
            if outputs is not None:
                return list(outputs)
            return [framework.from_tvm(t) for t in self._sets[0].tensors]

    def _bind(
        self, framework: NumpyArrays, values: Sequence[Any], outputs: Sequence[Any] | None
    ) -> BoundProgram:
        """Kernel calls on the caller's tensors; those of the last ones are kept."""
        to = self._targets.get(type(framework))
        if to is None:
            to = self._targets[type(framework)] = type(framework)(self._specs.outputs, self._device)
        targets = None if outputs is None else to.pointers(outputs)
        key = framework.pointers(values), targets
        if key[0] is None or (outputs is not None and targets is None):
            for own, tensors in ((framework, values), (to, outputs or ())):
                if tensors:
                    sort_out(own, own.inputs, tensors)
            raise ValueError(
                f"launch takes contiguous tensors on {self._device}, aligned to {ALIGNMENT} bytes"
            )
        if key not in self._bound:
            inputs = [framework.to_tvm(v) for v in values]
            made = self._sets[0].tensors if outputs is None else [to.to_tvm(t) for t in outputs]
            self._bound[key] = self._program.bind(inputs, made)
            if len(self._bound) > INPUT_SETS:
                self._bound.popitem(last=False)
        return self._bound[key]

    def time(self, values: Sequence[Any], number: int, repeat: int) -> list[float]:
        """Seconds per replay of each measurement, by CUDA events."""
        self(values)  # checks the tensors and captures
        with self._lock:
            stream, driver = self._stream, self._driver
            self._wait(stream)
            graph = self._graph(self._entries[None], self._inputs, 0)

            def replays() -> None:
                for _ in range(number):
                    driver.launch(graph, stream)

            return [driver.time(replays, stream) / number for _ in range(repeat)]
