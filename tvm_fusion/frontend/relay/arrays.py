"""Arrays as TVM writes them: base64 in a saved module, and plain in a parameters file.

The layout is that of ``NDArray::Save`` and ``SaveParams`` (TVM 0.8 to 0.16), little endian::

    array:      u64 magic, u64 0, i32 device type, i32 device id, i32 ndim, u8 code, u8 bits,
                u16 lanes, i64 shape[ndim], i64 byte count, data
    parameters: u64 magic, u64 0, u64 count, (u64 length, name)[count], u64 count, array[count]
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidModelError
from ..canonical.constants import np_dtype

_ARRAY_MAGIC = 0xDD5E40F096B4A13F
_LIST_MAGIC = 0xF7E58D4F05049CB7
_HEADER = struct.Struct("<QQiiiBBH")

#: (code, bits) -> dtype, for what numpy or ml_dtypes can hold.
_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (1, 1): "bool",
    (4, 16): "bfloat16",
}

#: Dtypes of tensors that can be imported.
DTYPES = frozenset(_DTYPES.values())

#: An array has at most this many axes.
MAX_RANK = 8

#: That many letters of base64 hold the longest head of an array.
_HEAD_TEXT = 4 * -(-(_HEADER.size + 8 * (MAX_RANK + 1)) // 3)

#: A constant may take this many bytes.
MAX_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class ArrayHeader:
    """Shape and dtype of a stored array, and where its data begin."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


def read_header(data: bytes | memoryview, where: str, offset: int = 0) -> ArrayHeader:
    """Read what precedes an array's data.

    Raises
    ------
    InvalidModelError
        If the bytes are no array, or one that is larger than ``MAX_BYTES``.
    """
    try:
        magic, _, _, _, ndim, code, bits, lanes = _HEADER.unpack_from(data, offset)
        if magic != _ARRAY_MAGIC or not 0 <= ndim <= MAX_RANK:
            raise InvalidModelError(f"{where} is not an array of TVM: the file is damaged")
        offset += _HEADER.size
        *shape, size = struct.unpack_from(f"<{ndim + 1}q", data, offset)
    except struct.error:
        raise InvalidModelError(f"{where} ends too early: the file is truncated") from None
    dtype = _DTYPES.get((code, bits))
    if dtype is None or lanes != 1:
        raise InvalidModelError(
            f"{where} has elements of type {code} with {bits} bits and {lanes} lanes, which cannot be imported: cast "
            "it to float32, or to an integer of 8, 16, 32 or 64 bits"
        )
    expected = np_dtype(dtype).itemsize
    for extent in shape:
        expected *= extent
    if min(shape, default=1) < 1 or expected != size:
        raise InvalidModelError(
            f"{where} claims the shape {tuple(shape)} of {dtype} and {size} bytes: the file is damaged"
        )
    if size > MAX_BYTES:
        raise InvalidModelError(
            f"{where} takes {size} bytes (limit {MAX_BYTES}): split the constant, or make it an input"
        )
    return ArrayHeader(tuple(shape), dtype, offset + 8 * (ndim + 1), size)


def read_array(data: bytes | memoryview, where: str, offset: int = 0) -> tuple[np.ndarray, int]:
    """Return an array, as a view of ``data``, and the offset after it."""
    header = read_header(data, where, offset)
    end = header.offset + header.size
    if len(data) < end:
        raise InvalidModelError(f"{where} ends too early: the file is truncated")
    count = header.size // np_dtype(header.dtype).itemsize
    array = np.frombuffer(data, np_dtype(header.dtype), count, header.offset)
    return array.reshape(header.shape), end


class StoredArrays:
    """The arrays of a saved module, decoded when they are asked for."""

    def __init__(self, texts: list[Any]) -> None:
        self._texts = texts
        self._decoded: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        array = self._decoded.get(index)
        if array is None:
            where = f"constant {index}"
            if not 0 <= index < len(self._texts):
                raise InvalidModelError(
                    f"it refers to {where}, but has {len(self._texts)} constants: the file is damaged or truncated"
                )
            text = self._texts[index]
            if not isinstance(text, str):
                raise InvalidModelError(f"{where} is no base64 text: the file is damaged")
            try:
                # The head alone first: what is too large is not decoded.
                read_header(base64.b64decode(text[:_HEAD_TEXT]), where)
                data = base64.b64decode(text)
            except (binascii.Error, ValueError):
                raise InvalidModelError(f"{where} is no base64 text: the file is damaged") from None
            array = self._decoded[index] = read_array(data, where)[0]
        return array


def load_params(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read a file of parameters that ``relay.save_param_dict`` wrote.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    dict of str to ndarray
        The arrays by name, read-only.

    Raises
    ------
    InvalidModelError
        If the file is missing or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidModelError(
            f"the parameters file {str(path)!r} does not exist: write it with relay.save_param_dict"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidModelError(
            f"the parameters file {str(path)!r} cannot be read: {error}"
        ) from None
    try:
        return parse_params(data)
    except InvalidModelError as error:
        raise InvalidModelError(
            f"the parameters file {str(path)!r} cannot be read: {error}"
        ) from None


def parse_params(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays by name in the bytes that ``relay.save_param_dict`` made."""
    position = 0

    def number() -> int:
        nonlocal position
        if position + 8 > len(data):
            raise InvalidModelError("it ends too early: the file is truncated")
        position += 8
        return struct.unpack_from("<Q", data, position - 8)[0]

    if number() != _LIST_MAGIC:
        raise InvalidModelError("it does not begin as a file of relay.save_param_dict does")
    number()
    names = []
    for _ in range(min(number(), len(data))):
        length = number()
        if position + length > len(data):
            raise InvalidModelError("it ends too early: the file is truncated")
        names.append(data[position : position + length].decode("utf-8", "replace"))
        position += length
    if number() != len(names):
        raise InvalidModelError("it does not hold one array for each name: the file is damaged")
    view, out = memoryview(data), {}
    for name in names:
        out[name], position = read_array(view, f"parameter {name!r}", position)
    return out


def as_params(
    params: Mapping[str, Any] | str | os.PathLike[str] | bytes | None,
) -> dict[str, np.ndarray]:
    """Return parameters given as a mapping, a file or its bytes as arrays by name.

    Raises
    ------
    InvalidModelError
        If the file is missing or damaged.
    TypeError
        If ``params`` is something else, or a value of the mapping is no array.
    """
    if params is None:
        return {}
    if isinstance(params, bytes):
        return parse_params(params)
    if isinstance(params, str | os.PathLike):
        return load_params(params)
    if not isinstance(params, Mapping):
        raise TypeError(f"params is a mapping, a file or its bytes, not {type(params).__name__}")
    out = {}
    for name, value in params.items():
        array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        if str(array.dtype) not in DTYPES:
            raise TypeError(
                f"parameter {name!r} is of dtype {array.dtype}, which no tensor can have"
            )
        out[str(name)] = array
    return out
