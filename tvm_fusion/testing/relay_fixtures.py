"""Saved Relay modules in small files: a network's structure, and how to make its weights again.

A network's JSON is nearly all weights. ``without_weights`` puts in the place of each large array its
shape and range; ``with_weights`` makes random arrays of these again, the same ones
everywhere. Relay's results, which are stored beside, are those of the made weights.

This file needs NumPy alone, so that the TVM with Relay and today's read the same fixtures.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

#: Arrays of more elements are made again; smaller ones stay in the file: they may be shapes or axes.
_KEPT = 16

#: How TVM writes an array: magic number, reserved, device, rank; code, bits and lanes of the dtype.
_HEAD = struct.Struct("<QQiiiBBH")
_MAGIC = 0xDD5E40F096B4A13F
_FLOAT = 2


def read_document(path: Path) -> Any:
    """Parse a saved module (gzipped JSON), with its weights.

    Parameters
    ----------
    path : Path
        A file ``NAME.json.gz``.
    """
    return with_weights(json.loads(gzip.decompress(path.read_bytes())))


def without_weights(document: Any) -> Any:
    """Replace each large float32 array of a parsed module by what it takes to make one like it.

    Parameters
    ----------
    document : dict
        What ``tvm.ir.save_json`` wrote, parsed. It is left untouched.

    Returns
    -------
    dict
        The document, in which such an array is ``{"shape": [...], "low": ..., "high": ...}``: those of a
        uniform distribution of the same mean and variance.
    """
    arrays = [_described(text) for text in document["b64ndarrays"]]
    return {**document, "b64ndarrays": arrays}


def with_weights(document: Any) -> Any:
    """Undo ``without_weights``, with uniformly distributed random numbers instead of the lost ones."""
    arrays = [
        text if isinstance(text, str) else _made(text, number)
        for number, text in enumerate(document["b64ndarrays"])
    ]
    return {**document, "b64ndarrays": arrays}


def _described(text: str) -> Any:
    data = base64.b64decode(text)
    _, _, _, _, rank, code, bits, lanes = _HEAD.unpack_from(data)
    shape = list(struct.unpack_from(f"<{rank}q", data, _HEAD.size))
    if (code, bits, lanes) != (_FLOAT, 32, 1) or np.prod(shape) <= _KEPT:
        return text
    values = np.frombuffer(data, "<f4", offset=_HEAD.size + 8 * rank + 8)
    middle = float(values.mean(dtype="float64"))
    reach = math.sqrt(3) * float(values.std(dtype="float64"))  # a uniform distribution's
    return {"shape": shape, "low": middle - reach, "high": middle + reach}


def _made(entry: dict[str, Any], number: int) -> str:
    shape = entry["shape"]
    # RandomState's numbers are the same in every release of NumPy.
    values = np.random.RandomState(number).uniform(entry["low"], entry["high"], shape)
    data = values.astype("<f4").tobytes()
    head = _HEAD.pack(_MAGIC, 0, 1, 0, len(shape), _FLOAT, 32, 1)
    sizes = struct.pack(f"<{len(shape) + 1}q", *shape, len(data))
    return base64.b64encode(head + sizes + data).decode()


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Read the inputs by name, and Relay's results in order, from ``NAME.npz``.

    Inputs are stored as arrays ``in_<name>``, or, where they are large, are made again: ``seed_<name>``
    holds a seed and then the shape.
    """
    with np.load(path) as arrays:
        inputs = {}
        for key in arrays.files:
            kind, _, name = key.partition("_")
            if kind == "in":
                inputs[name] = arrays[key]
            elif kind == "seed":
                inputs[name] = made_input(*arrays[key].tolist())
        count = sum(key.startswith("out_") for key in arrays.files)
        return inputs, [arrays[f"out_{i}"] for i in range(count)]


def made_input(seed: int, *shape: int) -> np.ndarray:
    """A random float32 input."""
    return np.random.RandomState(seed).standard_normal(shape).astype("float32")
