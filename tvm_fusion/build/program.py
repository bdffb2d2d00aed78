"""The kernel calls of a model, recorded from one run of TVM's VM.

A model of static shapes makes the same calls every time. They are recorded once, with the memory
that the VM's static plan gave them, and can then be repeated without the VM, on other inputs and
outputs too. The recording holds the memory, so that nobody else gets it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi

from ..compat import relax, tvm
from ..errors import FusionError

#: VM instructions that only look at values of the host, or name tensors that are known already.
_BOOKKEEPING = frozenset(
    f"vm.builtin.{name}"
    for name in (
        "alloc_shape_heap", "check_func_info", "check_prim_value_info", "check_shape_info",
        "check_tensor_info", "check_tuple_info", "copy", "make_prim_value", "make_shape",
        "make_tuple", "match_prim_value", "match_shape", "null_value", "shape_of", "tuple_getitem",
    )
)  # fmt: skip
_ALLOC_STORAGE, _ALLOC_TENSOR = "vm.builtin.alloc_storage", "vm.builtin.alloc_tensor"
_RESHAPE = "vm.builtin.reshape"


class NotStaticError(FusionError):
    """The model's calls cannot be recorded once and repeated; the message says why."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Place of a tensor: a byte offset in a buffer, and the tensor as it was recorded."""

    buffer: int
    offset: int
    tensor: Any


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """Kernel calls on given memory.

    Parameters
    ----------
    calls : tuple of (callable, tuple)
        Kernels with their arguments.
    copies : tuple of (Tensor, Tensor)
        Targets and sources of outputs that no kernel writes: an input or a constant that is
        returned.
    """

    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
    copies: tuple[tuple[Any, Any], ...]

    def run(self, copy: Callable[[int, int, int], None]) -> None:
        """Make the calls; ``copy`` gets target address, source address and bytes."""
        for function, arguments in self.calls:
            function(*arguments)
        for target, source in self.copies:
            if size := tensor_bytes(target):
                copy(target.data_ptr(), source.data_ptr(), size)


@dataclasses.dataclass(frozen=True)
class Program:
    """The recorded calls of a model.

    Parameters
    ----------
    calls : tuple of (callable, tuple)
        Kernels with their arguments; tensors in memory that may change are `Slot` objects.
    inputs : int
        Number of inputs, which are the first buffers.
    sizes : dict of int to int
        Bytes of each other buffer.
    outputs : tuple of Slot or Tensor
        What the model returns; a Tensor is a constant.
    """

    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
    inputs: int
    sizes: dict[int, int]
    outputs: tuple[Any, ...]

    def writes(self, index: int) -> bool:
        """Whether kernels write an output in a buffer of its own, which another can replace."""
        slot = self.outputs[index]
        if not isinstance(slot, Slot) or slot.buffer < self.inputs:
            return False
        alone = sum(isinstance(o, Slot) and o.buffer == slot.buffer for o in self.outputs) == 1
        return alone and slot.offset == 0 and self.sizes[slot.buffer] == tensor_bytes(slot.tensor)

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], *, private: Any = None
    ) -> BoundProgram:
        """Put tensors in the place of inputs and outputs.

        Parameters
        ----------
        inputs, outputs : sequence of tvm.runtime.Tensor
            Dense tensors of the recorded shapes and dtypes.
        private : Device, optional
            Take new memory on this device for intermediate results, instead of the recording's own.
        """
        memory: dict[int, Any] = dict(enumerate(inputs))
        for index, tensor in enumerate(outputs):
            if self.writes(index):
                memory[self.outputs[index].buffer] = tensor
        if private is not None:
            for buffer in self.sizes.keys() - memory.keys():
                size = (self.sizes[buffer],)
                memory[buffer] = tvm.runtime.empty(size, "uint8", private)
        calls = tuple(
            (function, tuple(_place(argument, memory) for argument in arguments))
            for function, arguments in self.calls
        )
        copies = tuple(
            (tensor, _place(self.outputs[index], memory))
            for index, tensor in enumerate(outputs)
            if not self.writes(index)
        )
        return BoundProgram(calls, copies)


def record(
    vm: relax.VirtualMachine, function: str, inputs: Sequence[Any], owns: Callable[[str], bool]
) -> Program:
    """Run a model once and record its calls.

    Parameters
    ----------
    vm : VirtualMachine
        The loaded model; nobody else may call it meanwhile.
    function : str
        Name of its function.
    inputs : sequence of tvm.runtime.Tensor
        One tensor per input; their values do not matter, but must be legal.
    owns : callable
        Whether the library itself holds the kernel of a name.

    Raises
    ------
    NotStaticError
        If the calls depend on values, or are not kernels of the library.
    """
    recorder = _Recorder(inputs, owns)
    vm.set_instrument(recorder)
    try:
        result = vm[function](*inputs)
    finally:
        vm.set_instrument(None)
    if recorder.problem:
        raise NotStaticError(recorder.problem)
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    outputs = tuple(recorder.known.get(r.__chandle__(), r) for r in results)
    return Program(tuple(recorder.calls), len(inputs), recorder.sizes, outputs)


class _Recorder:
    """Called by the VM before and after each instruction."""

    def __init__(self, inputs: Sequence[Any], owns: Callable[[str], bool]) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.sizes: dict[int, int] = {}
        self.problem = ""
        #: Places by handle. They hold their tensors, so that no handle is used twice.
        self.known = {t.__chandle__(): Slot(i, 0, t) for i, t in enumerate(inputs)}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._inputs, self._owns = len(inputs), owns

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> int:
        if not before and not self.problem:
            self._note(function, str(name), result, args)
        return 0  # go on

    def _note(self, function: Any, name: str, result: Any, args: tuple[Any, ...]) -> None:
        if name == _ALLOC_STORAGE:
            self._storage(result, args)
        elif name == _ALLOC_TENSOR:
            buffer, _ = self._storages[args[0].__chandle__()]
            self.known[result.__chandle__()] = Slot(buffer, int(args[1]), result)
        elif name == _RESHAPE:
            place = self.known.get(args[0].__chandle__())
            if place is not None:
                self.known[result.__chandle__()] = dataclasses.replace(place, tensor=result)
        elif name in _BOOKKEEPING:
            pass
        elif not self._owns(name):
            self.problem = f"it calls {name}, which is no kernel of its own"
        elif result is not None:
            self.problem = f"{name} returns a value to the host"
        else:
            self.calls.append((function, tuple(self._argument(a) for a in args)))

    def _storage(self, result: Any, args: tuple[Any, ...]) -> None:
        _context, shape, device_index, dtype, _scope = args
        if device_index != 0:
            self.problem = "it keeps intermediate results in host memory"
            return
        buffer = self._inputs + len(self._storages)
        self._storages[result.__chandle__()] = (buffer, result)
        self.sizes[buffer] = math.prod(int(d) for d in shape) * _bytes_of(str(dtype))

    def _argument(self, value: Any) -> Any:
        return self.known.get(value.__chandle__(), value) if _is_tensor(value) else value


def _place(argument: Any, memory: dict[int, Any]) -> Any:
    """Return an argument as it is, or the same view into other memory."""
    if not isinstance(argument, Slot):
        return argument
    base, old = memory.get(argument.buffer), argument.tensor
    if base is None:
        return old
    if argument.offset == 0 and base.dtype == old.dtype and base.shape == old.shape:
        return base
    return base._create_view(old.shape, old.dtype, argument.offset)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tvm.runtime.Tensor)


def tensor_bytes(tensor: Any) -> int:
    """Bytes of a dense tensor's values."""
    return math.prod(tensor.shape) * _bytes_of(tensor.dtype)


def _bytes_of(dtype: Any) -> int:
    return (tvm_ffi.dtype(dtype).bits + 7) // 8
