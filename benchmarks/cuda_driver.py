"""The few calls of the CUDA driver that measuring needs, through ctypes: no other package is needed."""

from __future__ import annotations

import ctypes
from typing import Any

#: Functions of the driver that ``cuda.h`` renames to ``…_v2``.
_SECOND_VERSION = frozenset(
    ("cuMemAlloc", "cuMemFree", "cuMemcpyHtoD", "cuMemsetD32Async", "cuStreamBeginCapture", "cuEventElapsedTime")
)  # fmt: skip


class Driver:
    """The few calls of the CUDA driver that graphs and function attributes need.

    They act on the context that is current in the calling thread.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: Any) -> None:
        """Call a function of the driver.

        Raises
        ------
        RuntimeError
            With the name of the call, if it fails.
        """
        code = self._function(name)(*args)
        if code:
            raise RuntimeError(f"CUDA error {code} in {name}")

    def _function(self, name: str) -> Any:
        # Where there is a second version, cuda.h means that one; old drivers lack some.
        newer = getattr(self._lib, f"{name}_v2", None) if name in _SECOND_VERSION else None
        return newer or getattr(self._lib, name)

    def handle(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Call a function whose first argument takes a handle, and return that."""
        out = ctypes.c_void_p()
        self(name, ctypes.byref(out), *args)
        return out
