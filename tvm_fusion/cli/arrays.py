"""Arrays for ``tvm-fusion run``: read from .npy files or random, checked against a signature."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..build import TensorSpec
from ..build.inputs import numpy_dtype, random_array


def parse_inputs(texts: Sequence[str]) -> dict[str, Path]:
    """Parse ``NAME=FILE`` texts.

    Raises
    ------
    ValueError
        If a text has another form or a name comes twice.
    """
    files: dict[str, Path] = {}
    for text in texts:
        name, _, file = text.partition("=")
        if not name or not file:
            raise ValueError(f"--input {text!r} is not of the form NAME=FILE.npy")
        if name in files:
            raise ValueError(f"--input gives {name!r} twice")
        files[name] = Path(file)
    return files


def collect_inputs(
    signature: Sequence[TensorSpec], files: dict[str, Path], seed: int
) -> list[np.ndarray]:
    """Make one array for every input: from its file, or random if there is none.

    Raises
    ------
    ValueError
        If a file is for no input, is no array, or has another shape or dtype than the input.
    FileNotFoundError
        If a file does not exist.
    """
    unknown = sorted(files.keys() - {tensor.name for tensor in signature})
    if unknown:
        names = ", ".join(tensor.name for tensor in signature)
        raise ValueError(f"the model has no input {unknown[0]!r}; its inputs are: {names}")
    rng = np.random.default_rng(seed)
    return [
        read_array(files[tensor.name], tensor)
        if tensor.name in files
        else random_value(tensor, rng)
        for tensor in signature
    ]


def read_array(file: Path, tensor: TensorSpec) -> np.ndarray:
    """Read a .npy file as the value of an input."""
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        # numpy's own words are about files of objects, and how to load them unsafely.
        raise ValueError(
            f"{file} is no array file of plain numbers; write it with numpy.save({file.name!r}, array)"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{file} holds several arrays; give one .npy file for {tensor.name!r}")
    wanted = numpy_dtype(tensor.dtype)
    if array.dtype == np.dtype("V2") and wanted.itemsize == 2:
        # numpy has no bfloat16 and saves it as two raw bytes.
        array = array.view(wanted)
    if array.dtype != wanted or not _fits(array.shape, tensor.shape):
        raise ValueError(
            f"input {tensor.name!r} is {describe(tensor.dtype, tensor.shape)}, but {file} holds "
            f"{describe(str(array.dtype), array.shape)}"
        )
    return np.asarray(array, order="C")


def random_value(tensor: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Make a random value of an input whose shape is fixed."""
    symbolic = [dim for dim in tensor.shape if not isinstance(dim, int)]
    if symbolic:
        raise ValueError(
            f"dimension {symbolic[0]!r} of input {tensor.name!r} is not fixed; give the input "
            f"with --input {tensor.name}=FILE.npy"
        )
    return random_array(tensor, rng)


def save_outputs(
    folder: Path, signature: Sequence[TensorSpec], arrays: Sequence[np.ndarray]
) -> list[Path]:
    """Write each output as a .npy file named after it; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for position, (tensor, array) in enumerate(zip(signature, arrays, strict=True)):
        file = folder / (re.sub(r"[^\w.-]+", "_", tensor.name) + ".npy")
        if file in files:
            file = file.with_stem(f"{file.stem}_{position}")
        np.save(file, array, allow_pickle=False)
        files.append(file)
    return files


def describe(dtype: str, shape: Sequence[int | str]) -> str:
    """Write a type as ``float32[1, 3, 224, 224]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def summary(array: np.ndarray) -> str:
    """Describe an array's type and range in one line."""
    text = describe(str(array.dtype), array.shape)
    if array.size == 0:
        return text
    values = array.astype("float64")
    return f"{text} min {values.min():.6g} mean {values.mean():.6g} max {values.max():.6g}"


def _fits(shape: Sequence[int], wanted: Sequence[int | str]) -> bool:
    """Whether a shape is an instance of one that may be symbolic; equal symbols, equal sizes."""
    sizes: dict[str, int] = {}
    return len(shape) == len(wanted) and all(
        size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
        for size, dim in zip(shape, wanted, strict=True)
    )
