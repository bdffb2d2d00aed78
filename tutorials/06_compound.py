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
# # 06 · Compound fusion: a transformer block step by step
#
# One encoder block of BERT (Devlin et al., 2019), first with each strategy alone, then with all of them
# decided together.
#
# **The claim.** The block has 25 kernels when each operator is one. No strategy alone comes below 7; together
# they need 5 on a CPU and move 37 % less.

# %%
import matplotlib.pyplot as plt
import numpy as np
from lesson import AFTER, BEFORE, bench, caption, recorded, source, table, this_machine

import tvm_fusion as tf
from tvm_fusion.config import STRATEGIES
from tvm_fusion.testing.transformer_blocks import bert_block

GPU = "cuda:sm_90"
block = bert_block()  # 128 tokens, width 768, 12 heads

# %% [markdown]
# ## Counting by hand

# %%
parts = {
    "Q, K, V: product and bias each": 3 * 2,
    "heads turned to the front, and back": 3 + 1,
    "scores, scale, softmax, context": 4,
    "output: product, bias, residual, norm": 4,
    "FFN 1: product, bias, GELU": 3,
    "FFN 2: product, bias, residual, norm": 4,
}
everything = tf.plan(block)
table(("part", "kernels"), [*parts.items(), ("together", sum(parts.values()))])
assert sum(parts.values()) == everything.totals.launches_before == 25

# %% [markdown]
# ## One strategy at a time
#
# *Horizontal* merges the three projections, which read the same input. *Vertical* takes what follows a
# product into its kernel, and attention as a whole: scores never reach memory. *Cross* joins the residuals.
# *Compound* may combine what the others found, in one kernel: projections side by side, each with its bias.

# %%
rows, plans = [], {}
for strategy in STRATEGIES:
    plans[strategy] = tf.plan(block, config=tf.FusionConfig(strategies=(strategy,)))
plans["all together"] = everything
for name, plan in plans.items():
    t = plan.totals
    launches = f"{t.launches_before} → {t.launches_after}"
    moved = f"{t.bytes_before / 2**20:.1f} → {t.bytes_after / 2**20:.1f}"
    rows.append((name, len(plan.groups), launches, moved, f"{t.predicted_us_after:.0f}"))
table(("strategies", "groups", "kernels", "MiB", "predicted µs (reference CPU)"), rows)

t = everything.totals
alone = [plans[strategy].totals for strategy in ("vertical", "horizontal", "cross")]
assert min(a.launches_after for a in alone) == 7
assert t.launches_after == 5
assert round(1 - t.bytes_after / t.bytes_before, 2) == 0.37
assert t.predicted_us_after <= min(a.predicted_us_after for a in alone)

# %% [markdown]
# Weights are most of what is left: 27 MiB of float32 in this block, read once whatever is fused. Of the maps,
# two thirds are gone:

# %%
weights = 4 * (4 * 768 * 768 + 2 * 768 * 3072)
maps = t.bytes_before - weights, t.bytes_after - weights
print(f"weights {weights / 2**20:.1f} MiB; maps {maps[0] / 2**20:.1f} → {maps[1] / 2**20:.1f} MiB")
assert maps[1] / maps[0] < 1 / 3

# %% [markdown]
# ## What the groups are
#
# A compound group is kept only if it beats its parts; they are in the plan, with the time that each would
# take alone.

# %%
for group in everything.groups:
    print(f"{group.id}: {group.nodes[0]} … {group.nodes[-1]}")
    for part in group.parts:
        print(f"    {part.strategy}: {', '.join(part.nodes)} ({part.predicted_us:.0f} µs alone)")
(compound,) = [group for group in everything.groups if group.strategy == "compound"]
assert compound.members == 3 and compound.options["form"] == "merged"
assert {node.split("_")[0] for node in compound.nodes} == {"query", "key", "value"}

# %% [markdown]
# A *region* is a part of the model that several kernels serve together: the block is no group, it is five of
# them.

# %%
for region in everything.regions:
    print(f"{region.kind}: {region.name}: {', '.join(region.groups)}")

# %% [markdown]
# Why is it not one kernel? Between attention and the FFN every token needs the whole row of the other's
# result, and some edges are refused for good:

# %%
for refusal in everything.rejected:
    print(f"{' | '.join(refusal.nodes)[:60]:60} {refusal.reason}")
assert "not_convex" in {refusal.reason for refusal in everything.rejected}

# %% [markdown]
# ## Is it right?
#
# A smaller block (64 tokens, width 256, 4 heads), every group and the whole against TVM's own unfused
# lowering in float64.

# %%
small = bert_block(sequence=64, hidden=256, heads=4)
report = tf.verify(small)
print(report)
assert report.passed

# %% [markdown]
# ## On your machine

# %%
print(this_machine())
names = ["vertical", "horizontal", "cross", "all together"]
times = {}
for name in names:
    config = tf.FusionConfig() if name == "all together" else tf.FusionConfig(strategies=(name,))
    times[name] = bench(small, tf.plan(small, config=config), repeat=15)
fig, axis = plt.subplots()
at = np.arange(len(names))
axis.bar(
    at - 0.2,
    [times[n].unfused * 1e3 for n in names],
    0.4,
    color=BEFORE,
    label="one kernel an operator",
)
axis.bar(at + 0.2, [times[n].fused * 1e3 for n in names], 0.4, color=AFTER, label="fused")
axis.set_xticks(at, names)
axis.set_xlabel("strategies")
axis.set_ylabel("ms")
axis.set_ylim(top=1.3 * axis.get_ylim()[1])  # room for the legend
axis.legend(loc="upper right", ncols=2)
caption(f"The small block, float32. {this_machine()}.")

# %% [markdown]
# ## For a GPU, and recorded on one
#
# The plan for an H200 in float16 takes other decisions: norms of 768 columns stay on their own, since a block
# that holds whole rows leaves too few blocks for 132 multiprocessors.

# %%
plan = tf.plan(bert_block(dtype="float16"), GPU)
t = plan.totals
print(f"{t.launches_before} → {t.launches_after} kernels")
print(f"{t.bytes_before / 2**20:.1f} → {t.bytes_after / 2**20:.1f} MiB")
print(f"predicted {t.predicted_us_before:.0f} → {t.predicted_us_after:.0f} µs")
assert t.launches_after < 10

found = recorded("h200-rows.json")
print(source(found))
rows = []
for r in (r for r in found["rows"] if r["name"].startswith("bert")):
    ours, unfused, peer = r["ours_us"], r["unfused_us"], min(r["peers"].values())
    times_us = (f"{unfused:.1f}", f"{ours:.1f}", f"{unfused / ours:.2f}", f"{peer / ours:.2f}")
    rows.append((r["name"], r["dtype"], *times_us))
table(("block", "dtype", "unfused µs", "fused µs", "× unfused", "× best automatic peer"), rows)

# %% [markdown]
# ## Reading it honestly
#
# - At batch 1 a transformer block reads its weights once per 128 tokens: fusion cannot touch that, so a third
#   less traffic is about what there is.
# - The recorded rows are of a commit that did not fuse attention, which the plan above does: compare them
#   with the prediction at your own risk. With 8 × 512 tokens that commit was slower than PyTorch's compiler,
#   whose attention was one kernel.
# - A CPU plan predicts little gain in time, because products dominate; the clock above has the last word.
#
# Next: [07 your own](07_your_own.ipynb).
