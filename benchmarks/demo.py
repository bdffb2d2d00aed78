"""The main job on a real network, through the ordinary command line (``make demo``).

The network is SqueezeNet as the onnx package ships it, with seeded random weights; any other name
of ``tvm_fusion.testing.models.LIGHT_MODELS`` can be given as the argument.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import onnx

from tvm_fusion.testing.models import light_model

FOLDER = Path(".demo")


def step(*arguments: object) -> None:
    """Show one command and run it; stop the demo if it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ tvm-fusion {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "tvm_fusion.cli", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main(name: str = "squeezenet") -> None:
    """Plan, compile, run, verify and time one network on the CPU."""
    FOLDER.mkdir(exist_ok=True)
    model, library = FOLDER / f"{name}.onnx", FOLDER / f"{name}.so"
    onnx.save(light_model(name), model)
    print(f"{model}: {name} with random weights, {model.stat().st_size / 2**20:.1f} MiB")
    step("plan", model)
    step("plan", model, "-o", FOLDER / "plan.json")
    step("compile", model, "--plan", FOLDER / "plan.json", "-o", library)
    step("run", library, "--output", FOLDER / "outputs")
    step("verify", model)
    step("bench", model)


if __name__ == "__main__":
    main(*sys.argv[1:])
