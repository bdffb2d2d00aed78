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
# # 02 · Why fuse
#
# Memory traffic, launches and arithmetic intensity, counted by hand and checked against what a plan says.
# Then the roofline: how fast a kernel can be, given how many FLOPs it does for each byte.
#
# **The claim.** Four parallel 3×3 convolutions on a 128×128×64 map in float16, summed, are 7 kernels that
# move 34 MiB; fused they are one kernel that moves 4 MiB and the weights.

# %%
import matplotlib.pyplot as plt
import numpy as np
from lesson import (
    AFTER,
    FOURTH,
    THIRD,
    bench,
    caption,
    recorded,
    source,
    table,
    this_machine,
)

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.devices import DEVICES
from tvm_fusion.testing.blocks import depthwise_pointwise
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs

GPU = "cuda:sm_90"  # plans need no GPU

# %% [markdown]
# ## Counting
#
# A kernel reads its inputs and weights and writes its result. A map `M` of 128 × 128 × 64 float16 values is 2
# MiB; the weights `W` of a 3×3 convolution from 64 to 64 channels are 72 KiB.

# %%
M = 128 * 128 * 64 * 2
W = 3 * 3 * 64 * 64 * 2
before = 4 * (M + W + M) + 3 * (M + M + M)  # four convolutions, three additions of two maps
after = M + 4 * W + M

plan = tf.plan(parallel_convs(4, dtype="float16", layout="NHWC"), target=GPU)
totals = plan.totals
assert (totals.launches_before, totals.launches_after) == (7, 1)
assert (totals.bytes_before, totals.bytes_after) == (before, after)
print(
    f"{before / 2**20:.1f} MiB → {after / 2**20:.1f} MiB, of which weights {4 * W / 2**20:.2f} MiB"
)

# %% [markdown]
# The intermediate maps are gone: three quarters of the 34 MiB were results that the next kernel read back.
# (The plan still counts four weights; convolution is linear, so the compiler adds them and the kernel reads
# their sum. More in [03](03_horizontal.ipynb).)
#
# ## Five more cases, by hand


# %%
def conv_bn_relu(folded: bool):
    """A 3×3 convolution, a batch norm that is folded or left as a per-channel shift, and a ReLU: a map of 4 MiB."""
    b = ModuleBuilder("float16", "NHWC")
    y = b.conv("conv", b.input("x", (1, 128, 128, 128)), 128)
    return b.finish(b.relu("relu", y if folded else b.bias("bn", y)))


def projections(heads: int = 8, tokens: int = 128, hidden: int = 512, width: int = 64):
    """The Q, K and V projections of every head, each a product of its own."""
    b = ModuleBuilder("float16")
    x = b.input("x", (tokens, hidden))
    return b.finish(
        *[b.dense(f"{k}{i}", x, width, bias=False) for k in "qkv" for i in range(heads)]
    )


def dense_norms(heads: int = 4, rows: int = 128, width: int = 256):
    """Four fully connected layers of one input, each with a layer norm."""
    b = ModuleBuilder("float16")
    x = b.input("x", (rows, width))
    heads_of = [b.dense(f"fc{i}", x, width, bias=False) for i in range(heads)]
    return b.finish(*[b.layer_norm(f"norm{i}", y) for i, y in enumerate(heads_of)])


MAP = 128 * 128 * 128 * 2  # 4 MiB
KERNEL = 3 * 3 * 128 * 128 * 2
X, WX, Y = 128 * 512 * 2, 512 * 64 * 2, 128 * 64 * 2  # projections: input, weight, result
R, WR, G = 128 * 256 * 2, 256 * 256 * 2, 2 * 256 * 2  # heads: map, weight, scale and shift
cases = {
    "3 convolutions, summed": (
        parallel_convs(3, dtype="float16", layout="NHWC"),
        (5, 1), (3 * (2 * M + W) + 2 * 3 * M, 2 * M + 3 * W),
    ),
    "conv + BN + ReLU, BN kept": (
        conv_bn_relu(folded=False), (3, 1), (3 * 2 * MAP + KERNEL + 128 * 2, 2 * MAP + KERNEL + 128 * 2),
    ),
    "conv + BN + ReLU, BN folded": (
        conv_bn_relu(folded=True), (2, 1), (2 * 2 * MAP + KERNEL, 2 * MAP + KERNEL),
    ),
    "Q, K, V of 8 heads": (projections(), (24, 1), (24 * (X + WX + Y), X + 24 * (WX + Y))),
    "4 × (FC + LayerNorm)": (
        dense_norms(), (8, 2), (4 * (R + WR + R) + 4 * (R + G + R), R + 4 * (WR + R) + 4 * (R + G + R)),
    ),
}  # fmt: skip
plans, rows = {"4 convolutions, summed": plan}, []
for name, (module, launches, traffic) in cases.items():
    plans[name] = tf.plan(module, target=GPU)
    t = plans[name].totals
    assert (t.launches_before, t.launches_after) == launches, name
    assert (t.bytes_before, t.bytes_after) == traffic, name
for name, p in plans.items():
    t = p.totals
    rows.append((
        name, f"{t.launches_before} → {t.launches_after}",
        f"{t.bytes_before / 2**20:.2f} → {t.bytes_after / 2**20:.2f}",
        f"{t.flops_before / t.bytes_before:.0f} → {t.flops_after / t.bytes_after:.0f}",
    ))  # fmt: skip
table(("case (float16)", "launches", "MiB", "FLOP/B"), rows)

# %% [markdown]
# The last case ends in two kernels, not one: the four products share one and the four norms another. A norm
# needs whole rows, and one kernel for both would have to keep four rows of 256 columns on chip; the plan
# predicts two to be faster at this size. **More fusion is not the goal; less time is.**
#
# ## Low intensity: depthwise + pointwise
#
# MobileNet's pair on 112 × 112, 32 → 64 channels. A depthwise convolution does 9 multiplications for each
# value that it reads.

# %%
for dtype, layout, expected in (("float16", "NHWC", (4.5, 25.3)), ("float32", "NCHW", (2.2, 12.6))):
    t = tf.plan(depthwise_pointwise(dtype=dtype, layout=layout), target=GPU).totals
    intensity = (t.flops_before / t.bytes_before, t.flops_after / t.bytes_after)
    assert tuple(round(v, 1) for v in intensity) == expected
    assert (t.launches_before, t.launches_after) == (6, 1)
    print(f"{dtype}: {intensity[0]:.1f} → {intensity[1]:.1f} FLOP/B")

# %% [markdown]
# ## The roofline
#
# A kernel takes at least its FLOPs over the peak rate, and at least its bytes over the memory bandwidth
# (Williams, Waterman and Patterson, CACM 2009). Measured points are this project's kernels on an H200, from a
# recorded run.

# %%
chip = DEVICES["sm_90"]
found = recorded("h200-figures.json")
print(source(found))
peak, bandwidth = chip.peak_flops("float16"), chip.memory_bandwidth
shown = {
    "convsum4": "4 convolutions", "qkv8": "Q, K, V", "cbr_map": "conv + BN + ReLU", "dwpw": "depthwise + 1×1",
    "fcln4": "FC + LayerNorm",
}  # fmt: skip
x = np.logspace(0, 3.2, 100)
fig, axis = plt.subplots(figsize=(9, 5))
axis.loglog(x, np.minimum(peak, x * bandwidth) / 1e12, color="black", label="roof (data sheet)")
for colour, (name, title) in zip(
    (AFTER, THIRD, FOURTH, "#CC79A7", "#E69F00"), shown.items(), strict=True
):
    (row,) = [r for r in found["rows"] if (r["name"], r["dtype"]) == (name, "float16")]
    points = []
    for side, us in (("unfused", row["unfused_us"]), ("ours", row["ours_us"])):
        about = row["about"][side]
        points.append((about["plan_flops"] / about["plan_bytes"], about["plan_flops"] / us / 1e6))
    (x0, y0), (x1, y1) = points
    axis.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "->", "color": colour})
    axis.plot([x0], [y0], "o", mfc="white", color=colour)
    axis.plot([x1], [y1], "o", color=colour, label=title)
    assert x1 > x0  # fusing raises the intensity
    assert row["ours_us"] < row["unfused_us"]
axis.set_xlabel("arithmetic intensity (FLOP per byte moved)")
axis.set_ylabel("TFLOP/s")
axis.legend(loc="lower right", fontsize=9)
caption(f"Unfused (hollow) to fused (filled), float16. Measured: {source(found)}.")

# %% [markdown]
# All arrows go right (fewer bytes for the same work). Where the arrow goes *up* too, the kernel was waiting
# for memory or for its launch. The four convolutions do a quarter of the arithmetic after their weights were
# added, so their FLOP/s need not rise for the time to fall:

# %%
table(
    ("case, float16, H200", "unfused µs", "fused µs", "×"),
    [
        (
            title,
            f"{r['unfused_us']:.1f}",
            f"{r['ours_us']:.1f}",
            f"{r['unfused_us'] / r['ours_us']:.2f}",
        )
        for name, title in shown.items()
        for r in found["rows"]
        if (r["name"], r["dtype"]) == (name, "float16")
    ],
)

# %% [markdown]
# ## On your machine
#
# The clearest case on any machine: eight elementwise operators on a tensor that no cache holds (64 MiB).
# Unfused each reads and writes all of it.


# %%
def chain(operators: int, size: int):
    """add, ReLU, multiply, abs, …, one after the other."""
    b = ModuleBuilder()
    x = b.input("x", (size,))
    makers = (
        lambda v: relax.op.add(v, b.const(1)), relax.op.nn.relu,
        lambda v: relax.op.multiply(v, b.const(1)), relax.op.abs,
    )  # fmt: skip
    for i in range(operators):
        x = b.op(f"op{i}", makers[i % 4](x))
    return b.finish(x)


size = 2**24
module = chain(8, size)
plan = tf.plan(module, target="llvm")
t = plan.totals
assert (t.launches_before, t.launches_after) == (8, 1)
# Constants of one number are part of the code and move nothing.
assert (t.bytes_before, t.bytes_after) == (8 * 2 * size * 4, 2 * size * 4)

values = np.random.default_rng(0).standard_normal(size).astype("float32")
one_kernel, eight = (
    tf.compile(module, plan=p, verify=False)
    for p in (plan, tf.plan(module, config=tf.FusionConfig(deny=("*",))))
)
assert eight.plan.totals.launches_after == 8
assert np.array_equal(one_kernel(values)[0], eight(values)[0])

result = bench(module, plan)
print(this_machine())
print(result)
for name, seconds, moved in (
    ("unfused", result.unfused, t.bytes_before),
    ("fused", result.fused, t.bytes_after),
):
    print(f"{name:8} {moved / seconds / 1e9:6.1f} GB/s")

# %% [markdown]
# ## Reading it honestly
#
# - The ratio of times is close to the ratio of bytes only where memory is what limits. Both sides should
#   reach a similar GB/s; where the fused one reaches less, something else (arithmetic, threads) has become
#   the limit.
# - Counts assume that every kernel's tensors come from memory. A level-2 cache of 50 MiB holds a 2 MiB map,
#   so on an H200 the unfused kernels of the small cases read from the cache; that is why their measured GB/s
#   can exceed the data sheet's, and why launches matter as much as bytes there.
# - The peak in the plot is the maker's, for dense float16 with float32 sums. The kernels reach a part of it.
#
# Next: [03 horizontal](03_horizontal.ipynb).
