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
# # 10 · From Relay
#
# Relay left TVM in release 0.20. Its models and scripts did not disappear. This notebook annotates a network
# *in Relay*, in a Relay `Sequential`, saves it, and goes on here; then it takes a whole SqueezeNet that way.
#
# **The claim.** Either side decides the same groups: 91 operators of SqueezeNet become 23 kernels whether
# Relay's passes annotate them or the plan is made here, and the results are Relay's own within 1e-4 of the largest.

# %%
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from lesson import AFTER, BEFORE, bench, caption, table, this_machine

import tvm_fusion as tf
from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.testing import relay_environment
from tvm_fusion.testing.relay_fixtures import read_arrays, read_document

GPU = "cuda:sm_90a"
ROOT = Path.cwd().parent  # of the checkout

# %% [markdown]
# ## In Relay
#
# The script `relay_side.py` is for a TVM that has Relay. Its core is a Relay `Sequential` like any other, with
# the fusion passes behind TVM's own:
#
# ```python
# import tvm_fusion.relay as fusion
#
# with tvm.transform.PassContext(opt_level=3):        # FoldScaleAxis is skipped below 3
#     mod = tvm.transform.Sequential([
#         relay.transform.InferType(), relay.transform.SimplifyInference(),
#         relay.transform.FoldScaleAxis(), relay.transform.FoldConstant(),
#         fusion.VerticalFusion(target="cuda:sm_90a"), fusion.HorizontalFusion(target="cuda:sm_90a"),
#         fusion.CrossFusion(target="cuda:sm_90a"), fusion.CompoundFusion(target="cuda:sm_90a"),
#     ])(mod)
# open("net.json", "w").write(tvm.ir.save_json(mod))
# ```
#
# Two TVMs cannot share an interpreter, so it runs in another one, if `make relay-env` has made it; else the
# files are those that it wrote under TVM 0.16. The network: a convolution, three parallel ones behind it, joined,
# and a residual sum.

# %%
stored = Path("relay_side")
python = relay_environment.python_of()
if python is not None:
    folder = Path(tempfile.mkdtemp())
    subprocess.run([python, "relay_side.py", folder], check=True, capture_output=True)
    how = "run now, in an interpreter of its own"
else:
    folder, how = stored, "recorded"
relay_side = json.loads((folder / "passes.json").read_text(encoding="utf-8"))
print(f"TVM {relay_side['tvm']}: {how}")
assert relay_side == json.loads((stored / "passes.json").read_text(encoding="utf-8"))

rows = []
for name, groups in relay_side["groups"].items():
    kinds = [f"{strategy}({len(operators)})" for strategy, _, operators in groups]
    rows.append((name, len(groups), ", ".join(kinds)))
table(("behind", "groups", "strategy(operators)"), rows)
assert [row[1] for row in rows] == [5, 3, 3, 3]

# %% [markdown]
# `VerticalFusion` makes five chains. `HorizontalFusion` takes three of them, and the concatenation, into one
# group: a later pass absorbs whole groups of an earlier one where that costs less. The others find nothing
# better. The script also ran both modules on Relay's virtual machine: annotation changes no number.
#
# ## Here
#
# The file is read without Relay. Annotated functions stay groups; everything else is brought to Relax.

# %%
annotated = tf.frontend.relay.load(folder / "net.json")
kept = tf.plan(annotated, GPU)
print(kept)
last = relay_side["groups"]["CompoundFusion"]
assert [group.strategy for group in kept.groups] == [strategy for strategy, _, _ in last]
assert (kept.totals.launches_before, kept.totals.launches_after) == (17, 3)

# %% [markdown]
# Without the annotations the planner decides for itself, all strategies jointly. The groups are the same
# operators. What they are *called* need not be: jointly it is a compound group, because vertical fusion within the
# branches and horizontal fusion across them pay in one kernel.

# %%
plain = tf.transform.StripFusion()(annotated)
own = tf.plan(plain, GPU)
table(
    ("annotated in Relay", "planned here", "operators"),
    [(a.strategy, b.strategy, len(a.nodes)) for a, b in zip(kept.groups, own.groups, strict=True)],
)
assert [g.nodes for g in kept.groups] == [g.nodes for g in own.groups]
assert kept.totals.bytes_after == own.totals.bytes_after

# %% [markdown]
# Compiled for this CPU, against what Relay's virtual machine computed (it is stored beside the module), and
# group by group against the unfused operators in float64:

# %%
with np.load(folder / "net.npz") as arrays:
    value, relays = arrays["x"], arrays["out"]
(found,) = tf.compile(annotated, "llvm")(value)
print(
    f"largest difference from Relay {np.abs(found - relays).max():.1e}, of {np.abs(relays).max():.2f}"
)
assert np.allclose(found, relays, rtol=1e-4, atol=1e-4 * np.abs(relays).max())
report = tf.verify(annotated, "llvm")
assert report.passed
print(report)

# %% [markdown]
# And for the GPU, where the annotated module was meant to go. `nvcc` needs none to compile: one kernel for each
# annotation.

# %%
if shutil.which("nvcc"):
    compiled = tf.compile(annotated, GPU, verify=False)
    kernels = {
        kernel: resources
        for source in compiled.cuda_sources()
        for kernel, resources in kernel_resources(source, "sm_90a").items()
    }
    heads = ("kernel", "registers of a thread", "bytes spilled")
    table(heads, [(name, k.registers, k.spill_bytes) for name, k in sorted(kernels.items())])
    assert len(kernels) == len(compiled.plan.groups) == 3
    assert not any(k.spill_bytes for k in kernels.values())
else:
    print("no nvcc here; nvcc 13.0 made 3 kernels of the 3 groups, without spills")

# %% [markdown]
# ## A whole network
#
# `relay.testing`'s SqueezeNet for images of 64 × 64, annotated in Relay by the four passes as above, with an
# image and Relay's result. (It is one of the fixtures of the tests; the weights are drawn again from a seed.)

# %%
data = ROOT / "tests" / "frontend" / "relay" / "data" / "networks"
squeezenet = tf.frontend.relay.from_document(
    read_document(data / "squeezenet_annotated_16.json.gz")
)
bare = tf.transform.StripFusion()(squeezenet)
plans = {"annotated in Relay": tf.plan(squeezenet, GPU), "planned here": tf.plan(bare, GPU)}
rows = []
for name, plan in plans.items():
    t = plan.totals
    traffic = f"{t.bytes_before / 2**20:.1f} → {t.bytes_after / 2**20:.1f}"
    rows.append((name, len(plan.groups), f"{t.launches_before} → {t.launches_after}", traffic))
table(("", "groups", "launches", "MiB"), rows)
nodes = [sorted(group.nodes for group in plan.groups) for plan in plans.values()]
assert nodes[0] == nodes[1]
assert (t.launches_before, t.launches_after) == (91, 23)

# %%
inputs, (relays,) = read_arrays(data / "squeezenet.npz")
(found,) = tf.compile(squeezenet, "llvm", verify=False)(*inputs.values())
error = np.abs(found - relays).max() / np.abs(relays).max()
print(f"largest difference from Relay's result, of the largest value: {error:.1e}")
assert error < 1e-4

# %% [markdown]
# ## Time on your machine
#
# Relay would fuse by its own rules here, so this is no race against it: it is the imported model with this
# package's groups, against one kernel an operator.

# %%
print(this_machine())
result = bench(bare, tf.plan(bare, "llvm"))
print(result)
fig, axis = plt.subplots(figsize=(5, 3))
bars = {"one kernel\nan operator": (result.unfused, BEFORE), "as planned": (result.fused, AFTER)}
axis.bar(list(bars), [t * 1e3 for t, _ in bars.values()], color=[c for _, c in bars.values()])
axis.set_xlabel("kernels")
axis.set_ylabel("ms")
caption(f"SqueezeNet 64×64 from Relay, float32. {this_machine()}.")

# %% [markdown]
# ## What to change in a script
#
# | Relay | here |
# | --- | --- |
# | `tvm.ir.save_json`, `relay.save_param_dict` | `tf.frontend.relay.load("net.json", params="net.params")` |
# | `SimplifyInference`, `FoldScaleAxis`, `FoldConstant` | `load` has done it |
# | `CombineParallelConv2D` | `tf.transform.HorizontalFusion()` |
# | `FuseOps` | `tf.transform.VerticalFusion()`; all strategies jointly: `tf.transform.Fuse()` |
# | `fusion.StripFusion()` | `tf.transform.StripFusion()` |
# | `ToMixedPrecision` | `load(..., dtype="float16")`; sums stay in float32 |
# | `relay.build(mod, target, params=params)` | `tf.compile(mod, target)` |
# | `lib.export_library("net.so")` | `exe.export("net.so")` |
# | `GraphModule`: `set_input`, `run`, `get_output` | `outputs = exe(x)` |
# | `autotvm`, `auto_scheduler` | `tf.tune(mod, target, work_dir="tuned")` |
#
# The whole table, call by call, is in `docs/relay-models.md`; what the passes make of Relay's operators, and what
# they leave alone, in `docs/relay.md`.
#
# ## Reading it honestly
#
# - That both sides agree is no accident and no proof of quality: graph, strategies, guards and planner are the same
#   code. What is tested is that the two readers make the same graph of Relay's operators and of Relax's.
# - In Relay the annotation is as far as it goes. Its virtual machine runs the annotated module, and its own code
#   generators do not know what a group means; the kernels are made here.
# - 64 × 64 pixels are little work: on a CPU, where a launch is a function call, a quarter of the kernels need not
#   take less time. The figure above is of one run of one machine, whatever else that was doing.
# - If the model's ONNX file or PyTorch program still exists, import that instead: one step less, and better names.
# - Passes one after the other keep what the earlier ones wrote unless a larger group pays. `Fuse` decides all
#   strategies at once, and may find groups that no sequence of passes does.
# - What has no counterpart is refused with its place in the model: control flow, quantised operators, blocked layouts.
