"""The clean-up of `frontend.canonical` as one pass."""

from __future__ import annotations

from ..compat import tvm
from ..frontend.canonical import canonicalize


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Canonicalize")
class Canonicalize:
    """Bring a Relax module into the form that the fusion passes read.

    Parameters
    ----------
    dtype : str or None
        ``"float16"`` or ``"bfloat16"`` converts the model (and its convolutions to NHWC); None
        keeps its types.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self.dtype = dtype

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Clean a module up."""
        return canonicalize(mod, self.dtype)
