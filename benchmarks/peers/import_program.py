"""Child process: import an exported PyTorch program and save its canonical Relax module as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import tvm

from tvm_fusion import frontend


def main(program: str, dtype: str, output: str) -> None:
    """Import ``program`` in a dtype and write the module to ``output``."""
    module = frontend.load(program, dtype=dtype)
    Path(output).write_text(tvm.ir.save_json(module))


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the contenders: its file names are those of frameworks
    main(*sys.argv[1:])
