"""Values that a candidate gets, and what is said of those that it returns.

They are made from a seed wherever they are needed, so that no files of them travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..build.inputs import numpy_dtype, random_array
from ..build.signature import TensorSpec
from ..verification.verify import worst_element
from .measure import Inputs, Packed


@functools.lru_cache(maxsize=1)
def values_of(inputs: Inputs) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Values of the parameters that a kernel reads, by number, and its reference outputs.

    Those of the last kernel are kept: candidates of one kernel come one after another.
    """
    return input_arrays(inputs), [np.load(path) for path in inputs.references]


@functools.lru_cache(maxsize=1)
def _largest(inputs: Inputs) -> list[float]:
    """Largest magnitude of each reference output."""
    return [float(np.abs(r).max()) if r.size else 0.0 for r in values_of(inputs)[1]]


def input_arrays(inputs: Inputs) -> dict[int, np.ndarray]:
    """Values of the parameters that a kernel reads, by number.

    Standard normal values (0 and 1 for integers). Weights are divided by the root of how many of
    them are added up, so that chains of products stay in the range of float16: their number divided
    by their longest axis, which is exact where that axis counts the outputs.
    """
    rng = np.random.default_rng(inputs.seed)
    out = {}
    for number, spec in enumerate(inputs.params):
        if number in inputs.outputs:
            continue
        array = random_array(spec, rng)
        if array.dtype.kind not in "iub":
            if inputs.positive:
                array = np.abs(array)
            if number in inputs.constants and array.ndim > 1:
                fan = array.size / max(*array.shape, 1)
                array = (array / math.sqrt(max(fan, 1.0))).astype(array.dtype)
        out[number] = array
    return out


def packed_arrays(arrays: Mapping[int, np.ndarray], packed: Packed) -> dict[int, np.ndarray]:
    """The same with the constants as a kernel wants them."""
    out = dict(arrays)
    for number, axes in packed:
        out[number] = np.ascontiguousarray(np.transpose(arrays[number], axes))
    return out


def arguments(inputs: Inputs, packed: Packed) -> list[np.ndarray]:
    """All arguments of a candidate, outputs with values that no kernel leaves there by chance.

    Floats are NaN, integers -1.
    """
    arrays = packed_arrays(values_of(inputs)[0], packed)
    return [
        arrays[number] if number in arrays else undefined(spec)
        for number, spec in enumerate(inputs.params)
    ]


def undefined(spec: TensorSpec) -> np.ndarray:
    """An output that is not written yet: every bit is set, of booleans the lowest."""
    dtype = numpy_dtype(spec.dtype)
    count = math.prod(int(extent) for extent in spec.shape)
    raw = np.full(count * dtype.itemsize, undefined_byte(spec.dtype), np.uint8)
    return raw.view(dtype).reshape(spec.shape)


def undefined_byte(dtype: str) -> int:
    """What each byte of an output holds before it is written."""
    return 1 if dtype == "bool" else 0xFF


def difference(inputs: Inputs, outputs: Sequence[np.ndarray]) -> str:
    """Why results are wrong; empty if they are right."""
    references = values_of(inputs)[1]
    for number, got, wanted, most, tolerance in zip(
        inputs.outputs, outputs, references, _largest(inputs), inputs.tolerances, strict=True
    ):
        spec = inputs.params[number]
        if got.size == 0:
            continue
        if got.dtype.kind in "iub":
            differing = float(np.mean(got != wanted))
            if differing > tolerance:
                return f"{differing:.1%} of the elements of {spec.name} differ"
            continue
        # The usual case is quick; NaN and infinity fail it and are looked at more closely.
        with np.errstate(invalid="ignore", over="ignore"):
            if np.abs(got.astype(wanted.dtype) - wanted).max() <= tolerance * most < np.inf:
                continue
        error, where = worst_element(spec, got, wanted)
        if not error <= tolerance:
            return f"error {error:.2e} where {tolerance:.0e} is allowed: {where}"
    return ""
