"""Canonical module and plan → library: lowering, compilation, export, loading."""

from .executable import CompiledModel, LoadedModel, load
from .model import compile_model
from .signature import Signature, TensorSpec, read_signature

__all__ = [
    "CompiledModel",
    "LoadedModel",
    "Signature",
    "TensorSpec",
    "compile_model",
    "load",
    "read_signature",
]
