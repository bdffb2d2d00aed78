"""Child process: import exported PyTorch programs and save their canonical Relax modules as JSON.

Reads requests from standard input, a line each, ``{"program": path, "dtype": …, "output": path}``, and
answers each with a line ``{"ok": true}`` or ``{"error": text}``: loading PyTorch and TVM takes longer
than most imports.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like

    import tvm

    from tvm_fusion import frontend

    for line in sys.stdin:
        request = json.loads(line)
        try:
            module = frontend.load(request["program"], dtype=request["dtype"])
            Path(request["output"]).write_text(tvm.ir.save_json(module))
            answer = {"ok": True}
        except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"error": f"{type(error).__name__}: {lines[-1]}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the contenders: its file names are those of frameworks
    main()
