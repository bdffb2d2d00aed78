"""Tensor maps as the host part of a function makes them, for the emulated copy engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import tvm_ffi

from ..compat import ir, tirx, tvm

_ENCODE = "tirx.tensormap_encode_tiled"
#: Largest box along an axis; strides and addresses; a line of a box with 128-byte swizzle (CUDA Driver API,
#: ``cuTensorMapEncodeTiled``).
_BOX, _ALIGNMENT, _LINE, _SWIZZLES = 256, 16, 128, (0, 3)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What a kernel's copies need to know of a tensor.

    Attributes
    ----------
    name, tensor : str
        Names of the map, and of the parameter that it describes.
    element : int
        Bytes of an element.
    swizzle : int
        CUDA's number: 0 for none, 3 for 128 bytes.
    extents, strides, boxes : tuple of int
        Of each axis, the innermost first; strides in bytes.
    """

    name: str
    tensor: str
    element: int
    swizzle: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    boxes: tuple[int, ...]

    def described(self, number: int, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The map as the emulation has it, of the array of a number.

        Raises
        ------
        ValueError
            If CUDA's driver would refuse the map, or the tensor that it describes is larger than the array.
        """
        last = sum((e - 1) * s for e, s in zip(self.extents, self.strides, strict=True))
        nbytes = arrays[self.tensor].nbytes
        if last + self.element > nbytes:
            raise ValueError(
                f"the map {self.name} ends at byte {last + self.element} of {self.tensor}, which has {nbytes}"
            )
        self._check()
        padded = [
            (*some, *(0,) * (5 - len(some))) for some in (self.extents, self.strides, self.boxes)
        ]
        numbers = [number, len(self.extents), self.element, self.swizzle, *sum(padded, ())]
        return np.array(numbers, "int64")

    def _check(self) -> None:
        if self.swizzle not in _SWIZZLES:
            raise ValueError(
                f"the map {self.name} has swizzle {self.swizzle}; {_SWIZZLES} are emulated"
            )
        if any(stride % _ALIGNMENT for stride in self.strides[1:]):
            raise ValueError(
                f"strides of the map {self.name} are no multiples of 16: {self.strides}"
            )
        if not all(1 <= box <= _BOX for box in self.boxes):
            raise ValueError(
                f"boxes of the map {self.name} are not between 1 and {_BOX}: {self.boxes}"
            )
        line = self.boxes[0] * self.element
        if line % _ALIGNMENT or (self.swizzle and line > _LINE):
            raise ValueError(f"a line of a box of the map {self.name} has {line} bytes")


def tensor_maps(func: tirx.PrimFunc) -> tuple[TensorMap, ...]:
    """Return the tensor maps that a function makes before it launches its kernel."""
    found: list[TensorMap] = []

    def note(call: ir.Call) -> None:
        if getattr(call.op, "name", "") != _ENCODE:
            return
        rank = int(call.attrs.rank)
        place, data, *sizes = call.args
        numbers = [int(size) for size in sizes]
        element = tvm.DataType(str(call.attrs.descriptor_dtype)).bits // 8
        extents, strides = numbers[:rank], [element, *numbers[rank : 2 * rank - 1]]
        boxes, between = numbers[2 * rank - 1 : 3 * rank - 1], numbers[3 * rank - 1 :]
        if math.prod(between) != 1:
            raise ValueError(f"the map {place.name} leaves elements out, which is not emulated")
        found.append(
            TensorMap(
                str(place.name),
                str(data.args[0].name),
                element,
                int(call.attrs.swizzle),
                tuple(extents),
                tuple(strides),
                tuple(boxes),
            )
        )

    tvm_ffi.structural_walk(func.body, ((ir.Call, note),))
    return tuple(found)
