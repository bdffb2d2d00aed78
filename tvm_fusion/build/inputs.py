"""Inputs to compare and to time on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .signature import TensorSpec


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy type of a TVM type; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes  # numpy has no bfloat16; TVM depends on this package for it

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def make_inputs(specs: Sequence[TensorSpec], count: int, seed: int) -> Iterator[list[np.ndarray]]:
    """Yield one position-coded input, then ``count`` random ones.

    Parameters
    ----------
    specs : sequence of TensorSpec
        Inputs with static shapes.
    count : int
        Random inputs: standard normal values, or 0 and 1 for integers and booleans.
    seed : int
        Seed of the random values.

    Raises
    ------
    ValueError
        If a shape is symbolic.
    """
    require_static(specs)
    yield [position_coded(spec) for spec in specs]
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield [random_array(spec, rng) for spec in specs]


def require_static(specs: Sequence[TensorSpec]) -> None:
    """Raise ValueError, naming the input, if a shape is symbolic: such a model cannot be run on made-up inputs."""
    for spec in specs:
        if not all(isinstance(extent, int) for extent in spec.shape):
            raise ValueError(f"input {spec.name!r} has a symbolic shape; fix it with --shape")


def position_coded(spec: TensorSpec) -> np.ndarray:
    """Values that differ from row to row along every axis, so that a dropped or swapped index changes the result.

    A sum of one ramp per axis, each with another slope, between -1/3 and 1; integers count 0, 1, 0, 1…. The middle is
    not zero, so that no sum of the values cancels: what is left of one would be rounding, which differs in every order.
    """
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind in "iub":
        return (
            (np.indices(spec.shape).sum(axis=0) % 2).astype(dtype)
            if spec.shape
            else np.zeros((), dtype)
        )
    total = np.zeros(spec.shape)
    for axis, extent in enumerate(spec.shape):
        ramp = np.linspace(-1.0, 1.0, extent) if extent > 1 else np.zeros(extent)
        slope = 1.0 / (axis + 1) * (-1) ** axis
        total += slope * ramp.reshape([-1 if a == axis else 1 for a in range(len(spec.shape))])
    largest = np.abs(total).max() if total.size else 1.0
    return ((total / max(largest, 1e-12) + 0.5) / 1.5).astype(dtype)


def random_array(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Standard normal values, or 0 and 1 for integers and booleans."""
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind in "iub":
        return rng.integers(0, 2, spec.shape).astype(dtype)
    return rng.standard_normal(spec.shape).astype(dtype)
