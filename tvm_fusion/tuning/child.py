"""Runs a worker's module without PyTorch: ``python -m tvm_fusion.tuning.child MODULE [ARGUMENT...]``.

TVM imports PyTorch wherever it is installed, for tensors that workers never see. That takes one to several seconds a
process, and memory, above all of a PyTorch with CUDA.
"""

from __future__ import annotations

import runpy
import signal
import sys


def main() -> None:
    """Run the module that the command line names as if it had been started itself."""
    # Who ends the parent may tell its children too (service managers do). The parent ends them, after what it still
    # wants of them: a worker that was gone by itself would be a candidate that crashed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
