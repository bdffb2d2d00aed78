"""Runs a compiled model with TVM alone: nothing of tvm_fusion is imported.

    python examples/run_with_tvm.py model.so input.npy [more inputs] [--expect output.npy]

Inputs stand in the model's order. With ``--expect`` the first output is compared with that file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import tvm
from tvm import relax


def main() -> int:
    """Load, run twice, and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="library that tvm-fusion compile wrote")
    parser.add_argument("inputs", nargs="+", help=".npy files in the model's order")
    parser.add_argument("--expect", help=".npy file of the first output")
    options = parser.parse_args()

    library = tvm.runtime.load_module(options.model)
    # The library says what it takes: any virtual machine can ask it, without a GPU.
    signature = json.loads(str(relax.VirtualMachine(library, tvm.cpu())["tvm_fusion_signature"]()))
    kind = json.loads(signature["target"])["kind"]
    device = tvm.cpu() if kind == "llvm" else tvm.device(kind, 0)
    machine = relax.VirtualMachine(library, device)
    arrays = [np.load(file) for file in options.inputs]
    for array, spec in zip(arrays, signature["inputs"], strict=True):
        if list(array.shape) != spec["shape"] or str(array.dtype) != spec["dtype"]:
            parser.error(f"{spec['name']} must be {spec['dtype']}{spec['shape']}")
    tensors = [tvm.runtime.tensor(array, device) for array in arrays]

    machine["main"](*tensors)  # loads and allocates
    started = time.perf_counter()
    result = machine["main"](*tensors)
    device.sync()
    print(f"second call: {(time.perf_counter() - started) * 1e6:.1f} us on {device}")
    outputs = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    for spec, output in zip(signature["outputs"], outputs, strict=True):
        print(f"{spec['name']}: {spec['dtype']}{spec['shape']}, mean {output.numpy().mean():.6g}")

    if options.expect:
        expected, got = np.load(options.expect), outputs[0].numpy()
        if expected.shape != got.shape:
            print(f"the output is {got.shape}, not {expected.shape}", file=sys.stderr)
            return 1
        largest = np.abs(got - expected).max()
        print(f"largest difference {largest:.3g} of {np.abs(expected).max():.3g}")
        return 0 if largest <= 1e-4 * np.abs(expected).max() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
