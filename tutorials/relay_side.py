"""The Relay half of notebook 10, for a TVM that has Relay: a network, the fusion passes, Relay's own result.

    python relay_side.py FOLDER

writes ``net.json`` (the annotated module), ``net.npz`` (an input and Relay's result) and ``passes.json`` (the
groups behind each pass). ``tutorials/relay_side`` holds what that wrote under TVM 0.16.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import relay

import tvm_fusion.relay as fusion

TARGET = "cuda:sm_90a"  # planned for; nothing here needs a GPU
CPU = "llvm -mtriple=x86_64-linux-gnu"
CHANNELS = 8

random = np.random.RandomState(0)


def weight(*shape):
    """A random constant."""
    return relay.const(random.uniform(-0.3, 0.3, shape).astype("float32"))


def conv(x, kernel):
    """A convolution with batch norm, as a trained network has it."""
    y = relay.nn.conv2d(
        x, weight(CHANNELS, CHANNELS, kernel, kernel), padding=(kernel // 2, kernel // 2),
        channels=CHANNELS, kernel_size=(kernel, kernel),
    )  # fmt: skip
    mean, variance = weight(CHANNELS), relay.const(np.full(CHANNELS, 1.1, "float32"))
    return relay.nn.batch_norm(y, weight(CHANNELS), weight(CHANNELS), mean, variance)[0]


def network():
    """A chain, three branches of one map, and a residual sum."""
    x = relay.var("x", shape=(1, CHANNELS, 14, 14))
    stem = relay.nn.relu(conv(x, 3))
    branches = [relay.nn.relu(conv(stem, 3)) for _ in range(3)]
    joined = relay.concatenate(branches, axis=1)
    squeezed = relay.nn.conv2d(
        joined, weight(CHANNELS, 3 * CHANNELS, 1, 1), channels=CHANNELS, kernel_size=(1, 1)
    )
    out = relay.nn.relu(relay.add(relay.nn.bias_add(squeezed, weight(CHANNELS)), stem))
    return tvm.IRModule.from_expr(relay.Function([x], out))


def groups(mod):
    """The strategy, the depth and the operators of each group in ``main``."""
    found = []

    def visit(expr):
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            inside = []
            relay.analysis.post_order_visit(
                expr.op.body,
                lambda e: inside.append(e.op.name) if isinstance(e, relay.Call) else None,
            )
            attrs = expr.op.attrs
            found.append(
                [str(attrs["tvm_fusion.strategy"]), int(attrs["tvm_fusion.depth"]), inside]
            )

    relay.analysis.post_order_visit(mod["main"].body, visit)
    return found


def main(folder):
    """Annotate, run and save."""
    with tvm.transform.PassContext(opt_level=3):  # FoldScaleAxis is skipped below 3
        mod = tvm.transform.Sequential([
            relay.transform.InferType(), relay.transform.SimplifyInference(),
            relay.transform.FoldScaleAxis(), relay.transform.FoldConstant(),
        ])(network())  # fmt: skip
    plain, behind = mod, {}
    for make in (
        fusion.VerticalFusion, fusion.HorizontalFusion, fusion.CrossFusion, fusion.CompoundFusion,
    ):  # fmt: skip
        mod = make(target=TARGET)(mod)  # one after the other is what a Sequential does
        behind[make.__name__] = groups(mod)

    array = np.random.RandomState(1).uniform(-1, 1, (1, CHANNELS, 14, 14)).astype("float32")
    results = []
    for module in (plain, mod):
        run = relay.create_executor("vm", mod=module, device=tvm.cpu(), target=CPU).evaluate()
        results.append(run(array).numpy())
    assert np.allclose(*results, rtol=1e-5, atol=1e-6)

    # Folding adds TVM's own functions to the module, with their places on this machine.
    alone = tvm.IRModule({"main": mod["main"]})
    (folder / "net.json").write_text(tvm.ir.save_json(alone))
    np.savez_compressed(folder / "net.npz", x=array, out=results[0])
    text = json.dumps({"tvm": tvm.__version__, "groups": behind}, indent=1)
    (folder / "passes.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
