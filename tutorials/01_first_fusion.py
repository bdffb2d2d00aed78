# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · First fusion
#
# A real network from an ONNX file: plan it, read the plan, compile it, check it, and see whether it is faster
# here. All of it runs on a CPU.
#
# **The claim.** SqueezeNet has 91 operators. One kernel each, they move 78.8 MiB through memory; fused they
# are 23 kernels that move 27.6 MiB.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from lesson import AFTER, BEFORE, bench, caption, recorded_table, table, this_machine

import tvm_fusion as tf
from tvm_fusion.testing.models import light_model

print(this_machine())

# %% [markdown]
# ## The model
#
# The onnx package ships SqueezeNet (Iandola et al., 2016) without weights; `light_model` fills in random ones
# of a sensible scale. With a file of your own only the name changes.

# %%
folder = Path(tempfile.mkdtemp())
onnx.save(light_model("squeezenet"), folder / "squeezenet.onnx")
module = tf.frontend.load(folder / "squeezenet.onnx")

# %% [markdown]
# ## The plan
#
# `tf.plan` decides what shares a kernel and computes nothing. Here are its first lines; `tvm-fusion plan`
# prints more about each group, and `tvm_fusion.report.render_html(plan, module)` draws it.

# %%
plan = tf.plan(module, target="llvm", name="squeezenet")
print("\n".join(str(plan).splitlines()[:14]))

# %% [markdown]
# The claim, checked. A launch is a kernel that does work; a tensor counts once for each kernel that reads or
# writes it, weights included.

# %%
totals = plan.totals
assert (totals.launches_before, totals.launches_after) == (91, 23)
assert round(totals.bytes_before / 2**20, 1) == 78.8
assert round(totals.bytes_after / 2**20, 1) == 27.6
assert totals.flops_after == totals.flops_before  # nothing is computed twice

# %% [markdown]
# Which strategies found what:

# %%
rows = []
for strategy in ("vertical", "horizontal", "cross", "compound"):
    groups = [group for group in plan.groups if group.strategy == strategy]
    saved = sum(group.bytes_before - group.bytes_after for group in groups)
    operators = sum(len(group.operators) for group in groups)
    rows.append((strategy, len(groups), operators, f"{saved / 2**20:.1f}"))
table(("strategy", "groups", "operators", "MiB saved"), rows)
assert rows[0][1] == 10 and rows[3][1] == 8

# %% [markdown]
# *Vertical* groups are convolution + bias + ReLU. *Compound* ones are SqueezeNet's fire modules: two such
# chains on the same input, side by side in one kernel, whose results are concatenated by being written to the
# right place.
#
# Where do the bytes go?

# %%
fig, axis = plt.subplots(figsize=(9, 4))
names = [group.id.removeprefix("fused_") for group in plan.groups]
at = np.arange(len(names))
axis.bar(
    at - 0.2,
    [g.bytes_before / 2**20 for g in plan.groups],
    0.4,
    color=BEFORE,
    label="one kernel each",
)
axis.bar(at + 0.2, [g.bytes_after / 2**20 for g in plan.groups], 0.4, color=AFTER, label="fused")
axis.set_xticks(at, names, rotation=60, ha="right")
axis.set_ylabel("memory traffic (MiB)")
axis.set_xlabel("group, in the order of the network")
axis.legend()
caption("Bytes that each group moves, before and after. The first layers have the largest maps.")

# %% [markdown]
# ## What was not fused, and why
#
# Every refusal has a reason code. `tf.explain(module, node=...)` tells more about one node.

# %%
table(("operator", "type", "reason"), [(u.node, u.op, u.reason) for u in plan.ungrouped])
print()
print("\n".join(str(tf.explain(module, node=plan.ungrouped[0].node)).splitlines()[:12]))
assert {u.op for u in plan.ungrouped} == {"max_pool2d", "mean", "softmax"}

# %% [markdown]
# ## Compile, and compare with onnxruntime
#
# `tf.compile` compares every group with the unfused operators before it puts it in. That does not catch an
# error of the import, so the result is held against onnxruntime, which shares no code with this package.

# %%
model = tf.compile(module, target="llvm", plan=plan)
session = onnxruntime.InferenceSession(folder / "squeezenet.onnx")
image = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype("float32")
(expected,) = session.run(None, {session.get_inputs()[0].name: image})
(found,) = model(image)
error = np.abs(found - expected).max() / np.abs(expected).max()
print(f"largest difference: {error:.1e} of the largest value")
assert error < 1e-5

# %% [markdown]
# The compiled model is a file that plain TVM runs; `examples/` loads it from C++.

# %%
model.export(folder / "squeezenet.so")
(again,) = tf.load(folder / "squeezenet.so")(image)
assert np.array_equal(again, found)

# %% [markdown]
# ## Is it faster here?
#
# *Unfused* is the same module, the same templates and settings with one kernel per operator; the two take
# turns, so a machine that slows down slows both.

# %%
result = bench(module, plan)
print(this_machine())
print(result)

# %% [markdown]
# The same comparison on a GPU was recorded in this project's runs (an early version of the kernels, through
# TVM's virtual machine; the README has today's):

# %%
print("NVIDIA H200, apache-tvm 0.27.0.post1, 2026-11-29, commit 025da64, float32")
gpu = {row["model"]: row for row in recorded_table("h200-networks.md", "float32")}["squeezenet"]
table(
    ("", "fused ms", "unfused ms", "ratio"),
    [
        (
            "this machine",
            f"{result.fused * 1e3:.1f}",
            f"{result.unfused * 1e3:.1f}",
            f"{result.ratio:.2f}",
        ),
        ("H200", gpu["fused ms"], gpu["unfused ms"], gpu["ratio"]),
    ],
)

# %% [markdown]
# ## Reading it honestly
#
# - Traffic falls to a third, time does not: on a CPU convolutions are bound by arithmetic, and maps of a few
#   MiB stay in its caches. What is saved is the part that waited for memory.
# - The plan's microseconds are predictions for a reference CPU. They rank candidates, and are no claim about
#   your machine: the two lines above are.
# - The weights are random. Times do not depend on them; accuracy would.
#
# Next: [02 why fuse](02_why_fuse.ipynb) counts the bytes by hand.
