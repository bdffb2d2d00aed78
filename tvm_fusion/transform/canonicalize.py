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
    channels_last : bool
        Whether convolutions become NHWC whatever the dtype, as tensor cores want them.
    """

    def __init__(self, dtype: str | None = None, channels_last: bool = False) -> None:
        self.dtype, self.channels_last = dtype, channels_last

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Clean a module up."""
        return canonicalize(mod, self.dtype, channels_last=self.channels_last)
