"""Converters of Relay's operators to Relax, by name.

A converter takes the site and the operands (Relax expressions; a tuple of them for an operand that
is a tuple) and returns the result, or a tuple of results.
"""

from . import (
    convolution,
    creation,
    elementwise,
    image,
    indexing,
    matrix,
    normalization,
    pooling,
    reduction,
    shape,
)
from .registry import CONVERTERS, Converter

__all__ = [
    "CONVERTERS",
    "Converter",
    "convolution",
    "creation",
    "elementwise",
    "image",
    "indexing",
    "matrix",
    "normalization",
    "pooling",
    "reduction",
    "shape",
]
