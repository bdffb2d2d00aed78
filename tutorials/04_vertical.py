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
# # 04 · Vertical fusion and its depth
#
# A chain of producers and consumers in one kernel. How deep should it go?
#
# **The claim.** Of a chain's traffic, kernels of two operators save 50 %, of three or four 67 to 75 %, of
# five and more 80 % and up. What depth costs depends on the chain: elementwise operators behind a convolution
# cost nothing, while a narrow chain pulled over a broadcast is computed hundreds of times.

# %%
import shutil

import matplotlib.pyplot as plt
import numpy as np
from lesson import AFTER, THIRD, bench, caption, recorded, source, table, this_machine

import tvm_fusion as tf
from tvm_fusion.build.resources import KernelCompiler
from tvm_fusion.compat import relax
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies import Vertical
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.synthetic_blocks import relaxation_chain

GPU = "cuda:sm_90"

# %% [markdown]
# ## Counting
#
# Twelve elementwise operators on a tensor of `S` bytes move `2 · 12 · S`. In kernels of depth *d* there are
# `12 / d` of them, each with one read and one write: the saving is `1 - 1/d`.

# %%
OPERATORS, SIZE = 12, 2**22


def chain(operators: int, size: int):
    """negative, ReLU, abs, sigmoid, …, one after the other."""
    b = ModuleBuilder()
    x = b.input("x", (size,))
    makers = (relax.op.negative, relax.op.nn.relu, relax.op.abs, relax.op.sigmoid)
    for i in range(operators):
        x = b.op(f"op{i}", makers[i % 4](x))
    return b.finish(x)


module = chain(OPERATORS, SIZE)
plans = {d: tf.plan(module, config=tf.FusionConfig(max_depth=d)) for d in (1, 2, 3, 4, 6, 12)}
for depth, plan in plans.items():
    t = plan.totals
    assert t.launches_after == OPERATORS // depth
    assert t.bytes_before == 2 * OPERATORS * SIZE * 4
    assert t.bytes_after == t.bytes_before // depth
table(
    ("depth", "kernels", "MiB", "saved"),
    [
        (
            d,
            p.totals.launches_after,
            p.totals.bytes_after // 2**20,
            f"{1 - p.totals.bytes_after / p.totals.bytes_before:.0%}",
        )
        for d, p in plans.items()
    ],
)

# %% [markdown]
# The saving levels off: from depth 1 to 2 half of the traffic goes, from 6 to 12 another twelfth. Most of
# what a chain can gain, it gains with the first few operators.
#
# ## On your machine
#
# All depths give the same values, bit by bit. Then the clock.

# %%
values = np.random.default_rng(0).standard_normal(SIZE).astype("float32")
results = [tf.compile(module, plan=p, verify=False)(values)[0] for p in plans.values()]
assert all(np.array_equal(r, results[0]) for r in results)

print(this_machine())
times = {d: bench(module, p, repeat=5).fused for d, p in plans.items()}
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(times.keys(), [p.totals.bytes_after / 2**20 for p in plans.values()], "-o", color=AFTER)
left.set_ylabel("memory traffic (MiB)")
right.plot(times.keys(), [s * 1e3 for s in times.values()], "-o", color=THIRD)
right.set_ylabel("ms")
for axis in (left, right):
    axis.set_xlabel("depth: operators in a kernel")
    axis.set_ylim(bottom=0)
caption(
    f"Twelve elementwise operators on 16 MiB: traffic as counted, time as measured. {this_machine()}."
)

# %% [markdown]
# ## Behind a convolution
#
# The operators behind a convolution run on values that are in registers already. Does each more cost
# registers? The compiler says (`nvcc` needs no GPU; without it, the recorded figures of nvcc 13.0 for sm_90
# of 2026-11-30 are shown).


# %%
def tower():
    """A 3×3 convolution of a 56×56×64 map in float16 with seven operators behind it."""
    b = ModuleBuilder("float16", "NHWC")
    x = b.input("x", (1, 56, 56, 64))
    y = b.relu("relu", b.bias("bias", b.conv("conv", x, 64)))
    y = b.op("gelu", relax.op.nn.gelu(b.add("residual", y, x)))
    y = b.op("sigmoid", relax.op.sigmoid(b.op("scale", relax.op.multiply(y, b.const(1, 1, 1, 64)))))
    return b.finish(b.op("clip", relax.op.clip(y, 0.1, 0.9)))


RECORDED = dict.fromkeys(range(2, 9), (56, 0))
registers = {}
if shutil.which("nvcc"):
    compiler = KernelCompiler(tower(), parse_target(GPU))
    for proposal in Vertical().propose(from_relax(tower()).graph, tf.FusionConfig()):
        if proposal.operators[0] == "conv":
            (taken,) = compiler([proposal])
            registers[proposal.depth] = (taken.registers, taken.spill_bytes)
else:
    registers = RECORDED
t = {d: tf.plan(tower(), GPU, tf.FusionConfig(max_depth=d)).totals for d in registers}
table(
    ("depth", "registers", "spilled", "kernels", "MiB", "predicted µs"),
    [
        (
            d,
            *taken,
            t[d].launches_after,
            f"{t[d].bytes_after / 2**20:.2f}",
            f"{t[d].predicted_us_after:.1f}",
        )
        for d, taken in sorted(registers.items())
    ],
)
assert set(registers) == set(range(2, 9))
assert all(spilled == 0 for _, spilled in registers.values())

# %% [markdown]
# Registers do not grow: the accumulators of the convolution decide how many there are, and when the epilogue
# runs they are used up one by one. That a fifth operator is expensive holds where each operator brings
# *state* of its own, such as a second convolution, not for elementwise ones. On a GPU such chains should be
# fused whole, and the plan does.

# %%
plan = tf.plan(tower(), GPU)
(group,) = plan.groups
assert group.depth == 8 and plan.totals.launches_after == 1

# %% [markdown]
# ## Where deeper is worse
#
# `z ← exp(x - z / 2)`, eight times, on 512 values, then added to a 512 × 512 matrix. One kernel for all would
# compute the narrow chain again for each of the 512 columns.

# %%
narrow = relaxation_chain(depth=8, rows=512, width=512, dtype="float32")
plan = tf.plan(narrow)
(refusal,) = [r for r in plan.rejected if r.reason == "recompute"]
print(f"{refusal.outcome}: {refusal.detail}")
assert refusal.numbers["factor"] == 512
forced = tf.plan(narrow, config=tf.FusionConfig(max_recompute=1e6))
assert forced.totals.launches_after == 1 and plan.totals.launches_after == 2
factor = forced.totals.flops_after / plan.totals.flops_after
saved = (plan.totals.bytes_after - forced.totals.bytes_after) / 1024
print(f"forced into one kernel it does {factor:.0f} times the arithmetic, to save {saved:.0f} KiB")
assert factor > 20
assert tf.verify(narrow, plan=forced).passed  # right, and slow

print(this_machine())
timed = {name: bench(narrow, p) for name, p in (("as planned", plan), ("forced", forced))}
table(
    ("", "kernels", "µs"), [(n, r.fused_launches, f"{r.fused * 1e6:.0f}") for n, r in timed.items()]
)

# %% [markdown]
# Do not be surprised if the clock shows little here: on a CPU one thread walks along a row, and LLVM lifts
# what does not depend on the column out of that loop. On a GPU every column is another thread, and each would
# compute the chain for itself; that is what the guard is for.
#
# ## Recorded on a GPU
#
# Chains of this project's benchmark, unfused (one kernel an operator) and fused.

# %%
found = recorded("h200-rows.json")
print(source(found))
chains = ("cbr1", "cbr3", "dwpw", "gelu_ln")
rows = [r for r in found["rows"] if r["name"] in chains]
table(
    ("chain", "dtype", "unfused µs", "fused µs", "×"),
    [
        (
            r["title"],
            r["dtype"],
            f"{r['unfused_us']:.1f}",
            f"{r['ours_us']:.1f}",
            f"{r['unfused_us'] / r['ours_us']:.2f}",
        )
        for r in rows
    ],
)
assert all(r["ours_us"] < r["unfused_us"] for r in rows)

# %% [markdown]
# ## Reading it honestly
#
# - Bytes fall with `1 - 1/d` for elementwise chains only. A convolution with weights of its own, or a
#   residual that comes from elsewhere, keeps its own traffic.
# - Time follows bytes as long as memory is the limit. `sigmoid` and `gelu` are arithmetic; on a CPU without
#   fast exponentials they set the floor of the right plot.
# - The depth is chosen for each chain: by prediction here, by measurement after `tvm-fusion tune`, whose page
#   plots depth against latency for every chain of a model.
#
# Next: [05 cross](05_cross.ipynb).
