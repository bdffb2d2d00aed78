"""Tensors of other packages: where they lie, how TVM sees them, and how results go back.

Nothing is imported here that the caller has not imported: a framework is looked up when one of its
tensors arrives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi

from ..compat import tvm
from .inputs import numpy_dtype
from .signature import TensorSpec

#: Bytes to which TVM's generated code expects tensors to be aligned.
ALIGNMENT = 64

#: DLPack's numbers of host memory: plain, and page-locked by CUDA.
_HOST = (1, 3)


class NumpyArrays:
    """NumPy arrays, and whatever NumPy makes an array of. They lie on the host."""

    name = "numpy.ndarray"
    #: Whether results may be handed over before they are computed.
    asynchronous = False

    def __init__(self, inputs: Sequence[TensorSpec], device: Any) -> None:
        self.inputs, self.device = inputs, device

    def prepare(self, value: Any) -> Any:
        """Return what the other methods take."""
        return np.asarray(value)

    def dtype(self, value: Any) -> str:
        """TVM's name of the dtype."""
        return str(value.dtype)

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(value.shape)

    def place(self, value: Any) -> str:
        """Return ``"host"``, ``"device"`` (the model's), or the name of another device."""
        return "host"

    def pointers(self, values: Sequence[Any]) -> tuple[int, ...] | None:
        """Addresses of tensors that the model can read in place; None if any is not like that."""
        return None

    def stream(self) -> int:
        """Return the current stream of the model's device."""
        return 0

    def dense(self, value: Any) -> Any:
        """Return a tensor with the same values, row by row and aligned."""
        return np.asarray(value, order="C")

    def to_tvm(self, value: Any) -> Any:
        """TVM's view of a dense tensor; on the host it may be a copy."""
        return tvm.runtime.tensor(np.asarray(value, order="C"))

    def from_tvm(self, tensor: Any) -> Any:
        """Return TVM's tensor as one of the framework, without a copy where it can be."""
        return tensor.numpy()

    def upload(self, value: Any, target: Any) -> None:
        """Copy a tensor on the host into one of TVM's, and wait for it."""
        target.copyfrom(np.asarray(value, order="C"))

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Return new memory on the model's device, as TVM's tensor."""
        return tvm.runtime.empty(shape, dtype, self.device)


class DLPackTensors(NumpyArrays):
    """Tensors of any package that follows the DLPack protocol; results are TVM's tensors."""

    name = "DLPack tensor"

    def __init__(self, inputs: Sequence[TensorSpec], device: Any) -> None:
        super().__init__(inputs, device)
        #: DLPack's number of the model's device.
        self._number = device.dlpack_device_type(), device.index

    def prepare(self, value: Any) -> Any:
        """TVM's view of a tensor; what the framework has begun on it comes first."""
        if isinstance(value, tvm.runtime.Tensor):
            return value
        on_gpu = value.__dlpack_device__()[0] == self._number[0] == 2
        # 1 is the protocol's number of the default stream, on which such a call runs.
        capsule = value.__dlpack__(stream=1) if on_gpu else value.__dlpack__()
        return tvm_ffi.from_dlpack(capsule)

    def place(self, value: Any) -> str:
        """Return ``"host"``, ``"device"`` or a name, by the DLPack number of the device."""
        number = tuple(int(n) for n in value.__dlpack_device__())
        if number == self._number:
            return "device"
        return "host" if number[0] in _HOST else f"DLPack device {number}"

    def pointers(self, values: Sequence[Any]) -> tuple[int, ...] | None:
        """Addresses of TVM's tensors; those of other packages come as such from ``prepare``."""
        if len(values) != len(self.inputs):
            return None
        found = []
        for x, spec in zip(values, self.inputs, strict=True):
            if (
                not isinstance(x, tvm.runtime.Tensor)
                or x.dtype != spec.dtype
                or x.shape != spec.shape
                or x.__dlpack_device__() != self._number
                or not x.is_contiguous()
                or x.data_ptr() % ALIGNMENT
            ):
                return None
            found.append(x.data_ptr())
        return tuple(found)

    def dense(self, value: Any) -> Any:
        """Copy on the host; on a GPU a package that is not known here must do it itself."""
        if value.__dlpack_device__()[0] in _HOST and value.is_contiguous():
            return value.copyto(tvm.cpu())
        raise ValueError(
            f"a {self.name} must be contiguous and aligned to {ALIGNMENT} bytes; copy it first"
        )

    def to_tvm(self, value: Any) -> Any:
        """Return the tensor itself."""
        return value

    def upload(self, value: Any, target: Any) -> None:
        """Copy a tensor on the host into one of TVM's, and wait for it."""
        target.copyfrom(as_tvm(self, value, alignment=1))

    def from_tvm(self, tensor: Any) -> Any:
        """Return a view that holds the tensor, so that its references tell whether it is in use."""
        return tvm_ffi.from_dlpack(tensor.__dlpack__())


class TVMTensors(DLPackTensors):
    """TVM's own tensors; calls run on the stream that is set in TVM."""

    name = "tvm.runtime.Tensor"
    asynchronous = True

    def stream(self) -> int:
        """Return the stream set by ``tvm_ffi.use_raw_stream``."""
        return int(tvm_ffi.get_raw_stream(self.device) or 0) if self._number[0] == 2 else 0


class TorchTensors(DLPackTensors):
    """PyTorch's tensors; calls run on its current stream."""

    name = "torch.Tensor"
    asynchronous = True

    def __init__(self, inputs: Sequence[TensorSpec], device: Any) -> None:
        super().__init__(inputs, device)
        self._torch = torch = sys.modules["torch"]
        self._kinds = torch.Tensor, torch.strided
        kind, index = self._number
        self._index = index if kind == 2 else -1
        # A dtype that PyTorch lacks equals no tensor's.
        self._expected = [(getattr(torch, spec.dtype, None), tuple(spec.shape)) for spec in inputs]
        self._where = torch.device("cuda", index) if kind == 2 else torch.device("cpu")
        # The public call makes a Stream object first, which takes longer than all the rest.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._from_capsule = torch.utils.dlpack.from_dlpack

    def prepare(self, value: Any) -> Any:
        """Detach a tensor from its gradient."""
        if value.layout is not self._torch.strided:
            raise TypeError(f"its layout is {value.layout}")
        if value.requires_grad:
            if self._torch.is_grad_enabled():
                raise ValueError(
                    "the model computes no gradients; call it under torch.no_grad(), "
                    "or detach its inputs"
                )
            return value.detach()
        return value

    def dtype(self, value: Any) -> str:
        """TVM's name of the dtype."""
        return str(value.dtype).removeprefix("torch.")

    def pointers(self, values: Sequence[Any]) -> tuple[int, ...] | None:
        """Addresses; made to be quick, because every call asks."""
        expected, index, (tensor, strided) = self._expected, self._index, self._kinds
        if len(values) != len(expected):
            return None
        found = []
        for x, (dtype, shape) in zip(values, expected, strict=True):
            if (
                not isinstance(x, tensor)
                or x.dtype is not dtype
                or x.shape != shape
                or x.get_device() != index
                or x.requires_grad
                or x.layout is not strided
                or not x.is_contiguous()
            ):
                return None
            address = x.data_ptr()
            if address % ALIGNMENT:
                return None
            found.append(address)
        return tuple(found)

    def stream(self) -> int:
        """Return the current stream of the model's GPU."""
        if self._index < 0:
            return 0
        if self._raw_stream is not None:
            return self._raw_stream(self._index)
        return self._torch.cuda.current_stream(self._index).cuda_stream

    def dense(self, value: Any) -> Any:
        """Let PyTorch copy, on its current stream."""
        return value.clone(memory_format=self._torch.contiguous_format)

    def to_tvm(self, value: Any) -> Any:
        """TVM's view; no stream waits for another, since the call runs on PyTorch's own."""
        if hasattr(value, "__dlpack_c_exchange_api__") or not value.is_cuda:
            return tvm_ffi.from_dlpack(value)
        return tvm_ffi.from_dlpack(value.__dlpack__(stream=-1))

    def from_tvm(self, tensor: Any) -> Any:
        """PyTorch's view of a tensor."""
        return self._from_capsule(tensor.__dlpack__())

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Return memory of PyTorch's allocator, as TVM's tensor."""
        made = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._where)
        return self.to_tvm(made)


class CupyArrays(DLPackTensors):
    """CuPy's arrays; calls run on its current stream."""

    name = "cupy.ndarray"
    asynchronous = True

    def __init__(self, inputs: Sequence[TensorSpec], device: Any) -> None:
        super().__init__(inputs, device)
        self._cupy = sys.modules["cupy"]
        self._expected = [(numpy_dtype(spec.dtype), tuple(spec.shape)) for spec in inputs]
        #: The current stream and the one before: CuPy destroys a stream with its object, and the
        #: next call may have to wait for it.
        self._streams: tuple[Any, Any] = (None, None)

    def prepare(self, value: Any) -> Any:
        """Return the array itself."""
        return value

    def pointers(self, values: Sequence[Any]) -> tuple[int, ...] | None:
        """Addresses of dense, aligned arrays."""
        if len(values) != len(self._expected):
            return None
        found = []
        for x, (dtype, shape) in zip(values, self._expected, strict=True):
            if (
                not isinstance(x, self._cupy.ndarray)
                or x.shape != shape
                or x.dtype != dtype
                or x.data.device_id != self.device.index
                or not x.flags.c_contiguous
                or x.data.ptr % ALIGNMENT
            ):
                return None
            found.append(x.data.ptr)
        return tuple(found)

    def stream(self) -> int:
        """Return the current stream."""
        stream = self._cupy.cuda.get_current_stream()
        if self._streams[0] is None or self._streams[0].ptr != stream.ptr:
            self._streams = (stream, self._streams[0])
        return stream.ptr

    def dense(self, value: Any) -> Any:
        """Let CuPy copy, on its current stream."""
        return value.copy(order="C")

    def to_tvm(self, value: Any) -> Any:
        """TVM's view; no stream waits for another, since the call runs on CuPy's own."""
        return tvm_ffi.from_dlpack(value.__dlpack__(stream=-1))

    def from_tvm(self, tensor: Any) -> Any:
        """CuPy's view of a tensor."""
        return self._cupy.from_dlpack(tensor)


def sort_out(
    framework: NumpyArrays, specs: Sequence[TensorSpec], values: Sequence[Any]
) -> tuple[list[Any], bool]:
    """Check a call's tensors before compiled code sees them.

    Parameters
    ----------
    framework : NumpyArrays
        Framework of the first one.
    specs : sequence of TensorSpec
        The model's inputs.
    values : sequence
        One tensor per input.

    Returns
    -------
    values : list
        The tensors as the framework's methods take them.
    on_device : bool
        Whether they lie on the model's device; else on the host.

    Raises
    ------
    TypeError, ValueError
        If there are too many or too few, or one has another dtype, shape, device or framework.
    """
    if len(values) != len(specs):
        names = ", ".join(s.name for s in specs)
        raise ValueError(f"the model takes {len(specs)} inputs ({names}), got {len(values)}")
    prepared, places = [], set()
    for spec, value in zip(specs, values, strict=True):
        own = framework_of(type(value))
        if own is not type(framework):
            raise TypeError(
                f"input {spec.name!r} is a {own.name} and another a {framework.name}; "
                "pass tensors of one framework"
            )
        tensor = _prepared(framework, spec, value)
        _check(spec, framework.dtype(tensor), framework.shape(tensor))
        place = framework.place(tensor)
        if place not in ("host", "device"):
            raise ValueError(f"input {spec.name!r} is on {place}, the model on {framework.device}")
        places.add(place)
        prepared.append(tensor)
    if len(places) > 1:
        raise ValueError(f"the inputs must be all on {framework.device} or all on the host")
    return prepared, places == {"device"}


def _prepared(framework: NumpyArrays, spec: TensorSpec, value: Any) -> Any:
    try:
        return framework.prepare(value)
    except (BufferError, RuntimeError, TypeError) as err:
        raise TypeError(f"input {spec.name!r} cannot be read through DLPack: {err}") from err


def _check(spec: TensorSpec, dtype: str, shape: Sequence[int]) -> None:
    """Compare a tensor's dtype and shape with what the model takes.

    Raises
    ------
    TypeError, ValueError
        If the dtype or the shape differs.
    """
    if dtype != spec.dtype:
        raise TypeError(f"input {spec.name!r} must be {spec.dtype}, got {dtype}; convert it first")
    fixed = [(w, g) for w, g in zip(spec.shape, shape, strict=False) if isinstance(w, int)]
    if len(shape) != len(spec.shape) or any(w != g for w, g in fixed):
        raise ValueError(
            f"input {spec.name!r} must have shape {list(spec.shape)}, got {list(shape)}"
        )
    if any(g == 0 and w != 0 for w, g in zip(spec.shape, shape, strict=True)):
        # TVM leaves the result of a reduction over nothing unset.
        raise ValueError(f"input {spec.name!r} has no elements: its shape is {list(shape)}")


def as_tvm(framework: NumpyArrays, value: Any, alignment: int = ALIGNMENT) -> Any:
    """TVM's view of a tensor; of a copy if it is not contiguous or not aligned."""
    tensor = framework.to_tvm(value)
    if tensor.is_contiguous() and tensor.data_ptr() % alignment == 0:
        return tensor
    return framework.to_tvm(framework.dense(value))


@functools.cache
def framework_of(kind: type) -> type[NumpyArrays]:
    """Return the class that knows tensors of a type."""
    if issubclass(kind, tvm.runtime.Tensor):
        return TVMTensors
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not hasattr(kind, "__dlpack__") or "numpy" in roots:
        return NumpyArrays
    if "torch" in roots:
        return TorchTensors
    return CupyArrays if "cupy" in roots else DLPackTensors
