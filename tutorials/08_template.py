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
# # 08 · Write a schedule template and tune it
#
# A group becomes a kernel by a *schedule template*: it looks at what the function computes, and answers with
# loops, or with `None` if the function is not its own. Here you write one for CPUs, for a residual addition
# with a layer norm behind it, and let tuning choose its sizes.
#
# **The claim.** TVM's layer norm goes through each row three times: for the mean, for the variance, for the
# result. With the addition computed where it is needed, that is 6 reads and 1 write of the tensor, and 2
# sums whose additions wait for each other. One row at a time, 4 of the 6 reads find the row in the cache; with
# 8 partial sums in the lanes of a register, an addition waits for an eighth of the others. The template is 35
# lines.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tvm
from lesson import AFTER, BEFORE, THIRD, bench, caption, recorded, source, table, this_machine
from tvm import relax
from tvm_fusion.schedules import (
    ScheduleTemplate,
    alternatives,
    register,
    schedule,
    schedule_with,
    spaces,
    structure,
)

import tvm_fusion as tf
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.tuning.work_dir import WorkDir

ROWS, WIDTH = 1024, 1024
target = tvm.target.Target("llvm")


def weights(width):
    """Scale and shift of a norm."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(width).astype("float32") for _ in range(2)]


def add_norm(rows=ROWS, width=WIDTH):
    """A residual addition and the layer norm behind it."""
    b = ModuleBuilder()
    x, residual = b.input("x", (rows, width)), b.input("residual", (rows, width))
    y = b.op("sum", relax.op.add(x, residual))
    scale, shift = map(b.array, weights(width))
    return b.finish(b.op("norm", relax.op.nn.layer_norm(y, scale, shift, axes=[-1])))


module = add_norm()
plan = tf.plan(module)
print(plan)
assert len(plan.groups) == 1 and plan.totals.launches_after == 1

# %% [markdown]
# ## What a template is given
#
# The passes up to `LowerGroups` make one unscheduled `PrimFunc` of the group. `structure` says what is in it:
# per block its iterators (`S` spatial, `R` reduced), their extents, and whether it can be computed where it is
# used.


# %%
def function_of(module):
    """The unscheduled function of the one group of a module."""
    passes = [tf.transform.Canonicalize(), tf.transform.Fuse(), tf.transform.LowerGroups()]
    with target:
        lowered = tvm.transform.Sequential(passes)(module)
    (func,) = (f for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    return func


func = function_of(module)
blocks = structure(tvm.s_tir.Schedule(func)).blocks
heads = ("block", "iterators", "extents", "inlinable", "output")
table(heads, [(b.name, b.kinds, b.extents, b.is_injective, b.is_output) for b in blocks])
assert [b.kinds for b in blocks] == ["SS", "SR", "S", "SR", "SS"]

# %% [markdown]
# Two sums of rows, and three blocks that can be inlined. How does the package schedule that today?

# %%
assert schedule(func, target)[1] == "cpu_rows"
before = tf.compile(module, plan=plan)

# %% [markdown]
# ## The template
#
# First the refusals: whatever is not a function of this form is `None`, and the next template is asked. Then the
# two choices. `alternatives` gets a name and the options, best guess first; without tuning the first one is
# taken, so order them as you would choose. Then the schedule.


# %%
def divisors(extent, wanted):
    """A function that returns the first so many of the wanted sizes that divide an extent."""
    return lambda count: [size for size in wanted if extent % size == 0][:count]


class RowAtATime(ScheduleTemplate):
    """All stages of one row before the next row, and sums in lanes."""

    name = "row_at_a_time"
    kind = "llvm"

    def apply(self, func, target):
        """Return the schedule; None for a function of another form."""
        sch = tvm.s_tir.Schedule(func)
        info = structure(sch)
        if info is None or not (info.is_static and info.is_regular):
            return None
        if len(info.outputs) != 1 or not info.reductions:
            return None
        (out,) = info.outputs
        if out.kinds != "SS" or not out.is_injective:
            return None
        if any((b.kinds, b.extents) != ("SR", out.extents) for b in info.reductions):
            return None

        height, width = out.extents
        (lanes,) = alternatives("lanes", divisors(width, (8, 16, 32, 4, 64, 128, 1)))
        (rows,) = alternatives("rows", divisors(height, (8, 1, 64)))

        for block in info.blocks:
            if block.is_injective and not block.is_output:
                sch.compute_inline(block.handle)
        task, row = sch.split(sch.get_loops(out.handle)[0], [None, rows])
        sch.parallel(task)
        for block in reversed(info.reductions):
            _, lane = sch.split(sch.get_loops(block.handle)[1], [None, lanes])
            partial = sch.rfactor(lane, factor_axis=1)  # `lanes` sums, then their sum
            for stage in (block.handle, partial):
                sch.compute_at(stage, row, preserve_unit_loops=True)
            lane, _, step = sch.get_loops(partial)[2:]
            sch.reorder(step, lane)
            sch.vectorize(lane)
            start = sch.decompose_reduction(partial, step)
            sch.vectorize(sch.get_loops(start)[-1])
        _, lane = sch.split(sch.get_loops(out.handle)[-1], [None, lanes])
        sch.vectorize(lane)
        return sch


# %% [markdown]
# `register` puts it into the list; `before` names one that would take the function too. (`replace` lets this
# cell run twice.)

# %%
register(RowAtATime(), before="cpu_rows", replace=True)
scheduled, name = schedule(func, target)
assert name == "row_at_a_time"
after = tf.compile(module, plan=plan)
print(after.plan.groups[0].template, "in the place of", before.plan.groups[0].template)
assert after.plan.totals.launches_after == 1

# %% [markdown]
# ## Is it right?
#
# Against NumPy in float64, and at a size of which 8 and 64 are no divisors. What is not its own it leaves to
# the others: a softmax of three axes, and a pooling.


# %%
def reference(x, residual, scale, shift):
    """The group in float64."""
    y = x.astype("float64") + residual
    centred = y - y.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * scale + shift


def largest_error(rows, width):
    """Largest difference between the compiled module and the reference."""
    rng = np.random.default_rng(1)
    x, residual = (rng.standard_normal((rows, width)).astype("float32") for _ in range(2))
    model = tf.compile(add_norm(rows, width))
    assert model.plan.groups[0].template == "row_at_a_time"
    return np.abs(model(x, residual)[0] - reference(x, residual, *weights(width))).max()


errors = [(rows, width, largest_error(rows, width)) for rows, width in ((ROWS, WIDTH), (37, 300))]
table(("rows", "width", "largest error"), [(r, w, f"{e:.1e}") for r, w, e in errors])
assert max(error for _, _, error in errors) < 2e-5


def template_of(shape, make):
    """The template that takes one operator and a ReLU behind it."""
    b = ModuleBuilder()
    value = b.op("y", make(b.input("x", shape)))
    return schedule(function_of(b.finish(b.op("relu", relax.op.nn.relu(value)))), target)[1]


others = [
    template_of((4, 16, 16), relax.op.nn.softmax),
    template_of((1, 8, 16, 16), lambda x: relax.op.nn.max_pool2d(x, (2, 2))),
]
print(others)
assert "row_at_a_time" not in others

# %% [markdown]
# ## What may be tuned
#
# `spaces` asks the templates that take a function. Two choices make 7 x 3 = 21 candidates of ours; what the
# package would have done stays one of the candidates, too.

# %%
found = spaces(func, target)
for space in found:
    options = [f"{p.name}: {', '.join(str(o[0][1]) for o in p.options)}" for p in space.points]
    print(space.template, "|", "; ".join(options))
assert [space.template for space in found] == ["row_at_a_time", "cpu_rows"]
assert [len(point.options) for point in found[0].points] == [7, 3]

# %% [markdown]
# One candidate is made by hand so. More lanes need more registers: with 128, the sums of a row fill 32 vector
# registers of four values, and there are 16.

# %%
by_hand = schedule_with(func, target, "row_at_a_time", (("lanes", 16), ("rows", 8)))
assert "T.vectorized(T.int64(16))" in by_hand.script()

# %% [markdown]
# ## Tune it
#
# The same call as for any model. The template goes along to the processes that build candidates; each result is
# compared with the reference before its time counts.

# %%
TRIALS = 22
work = Path(tempfile.mkdtemp()) / "tuned"
print(this_machine())
tuned_plan = tf.tune(module, "llvm", work, trials=TRIALS)
print(tuned_plan)
(place,) = WorkDir(work).places()
lines = (place.folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()
group = [t for t in map(json.loads, lines) if len(t["operators"]) == 2 and t["verdict"] == "ok"]
times = {}
for trial in group:
    if trial["template"] == "row_at_a_time":
        chosen = dict(trial["decision"])
        times[chosen["lanes"], chosen["rows"]] = np.median(trial["samples_us"])
old = min(np.median(t["samples_us"]) for t in group if t["template"] == "cpu_rows")
print(
    f"{len(times)} candidates of ours timed; cpu_rows {old:.0f} µs, ours {min(times.values()):.0f}"
)
assert len(times) >= 5 and len({lanes for lanes, _ in times}) >= 3

# %%
fig, axis = plt.subplots()
best = {}
for (lanes, _), microseconds in times.items():
    best[lanes] = min(microseconds, best.get(lanes, microseconds))
axis.scatter([lanes for lanes, _ in times], list(times.values()), color=THIRD, label="candidates")
axis.plot(sorted(best), [best[n] for n in sorted(best)], color=AFTER, label="fastest of each")
axis.axhline(old, color=BEFORE, linestyle="--", label="cpu_rows")
axis.set_xscale("log", base=2)
axis.set_xticks(sorted(best), [str(lanes) for lanes in sorted(best)])
axis.set_xlabel("lanes (partial sums of a row)")
axis.set_ylabel("kernel (µs)")
axis.set_ylim(bottom=0)
axis.legend()
caption(f"Addition and layer norm, {ROWS}×{WIDTH}, float32. {this_machine()}.")

# %% [markdown]
# Compiled with the work dir, the model has what was measured best. It is compared with the untuned one, and
# both with what the package made before.

# %%
tuned = tf.compile(module, work_dir=work)
rng = np.random.default_rng(0)
inputs = [rng.standard_normal((ROWS, WIDTH)).astype("float32") for _ in range(2)]
np.testing.assert_allclose(tuned(*inputs)[0], before(*inputs)[0], rtol=1e-4, atol=1e-4)
models = {"cpu_rows": before, "row_at_a_time": after, "row_at_a_time, tuned": tuned}
medians = {n: np.median(m.time(*inputs, number=5, repeat=7)) * 1e6 for n, m in models.items()}
print(this_machine())
table(("", "µs"), [(name, f"{medians[name]:.0f}") for name in models])
print(bench(module, tuned.plan))

# %% [markdown]
# ## On a GPU
#
# The templates for CUDA are made the same way, with more to choose: tiles of products, threads, pipeline stages.
# What tuning their choices was worth was recorded for the benchmark's rows and networks, warm, float16:

# %%
gpu = recorded("h200-tuned.json")
print(source(gpu))
rows = [r for r in gpu["rows"] if r["dtype"] == "float16" and r.get("untuned_us")]
table(
    ("row", "first guess µs", "tuned µs", "×"),
    [
        (r["name"], f"{r['untuned_us']:.1f}", f"{r['ours_us']:.1f}", f"{r['untuned_us'] / r['ours_us']:.2f}")
        for r in rows
    ],
)  # fmt: skip
gained = [r["name"] for r in rows if r["untuned_us"] > 1.05 * r["ours_us"]]
print(f"more than 5 % faster: {len(gained)} of {len(rows)} ({', '.join(gained)})")
assert len(rows) >= 10 and gained

# %% [markdown]
# ## Reading it honestly
#
# - Most of the gain is the form, not the tuning: the first guess is already close to the best of the curve, and
#   tuning confirms it. On the GPU, too, it left most rows as they were, and made a few much faster. Nobody knows
#   which before it is measured.
# - The ends of the curve say why there is a choice: one lane waits for each addition, and too many lanes do not
#   fit into the registers. In between, differences are small and depend on the processor, and on a busy machine
#   they drown in the noise.
# - Sums in another order differ in the last digits. That is why the comparison has a tolerance, and why each
#   candidate is compared.
# - `row_at_a_time` takes one form and says so. A template that guesses at functions it was not written for fails
#   in a schedule primitive at best.
# - Records know a template by its name: if you change what it does, give it a new one, or measure anew. A process
#   that compiles with these records must register the template first, or the package's own is taken.
# - A template for CUDA is the same class with `kind = "cuda"`; `tvm_fusion.testing` runs its kernels on the CPU, and
#   `ptxas` counts its registers.
