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
# # 09 · Tune, stop, go on, and fail in CI
#
# Predictions rank; the clock decides. Tuning measures kernels *and* how deep to fuse, on the device that will
# run the model. Here it is this CPU, with 40 trials; on a GPU only the target changes.
#
# **The claim.** After 40 trials the plan rests on measured times. The same call again repeats no trial, and a
# CI build that measures nothing takes the decision from the records.

# %%
import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from lesson import AFTER, bench, caption, recorded, source, table, this_machine

import tvm_fusion as tf
from tvm_fusion.errors import TuningError
from tvm_fusion.testing.synthetic_blocks import cross_pair
from tvm_fusion.tuning.work_dir import WorkDir

TRIALS = 40
module = cross_pair(size=14)  # two convolutions with bias and ReLU, added
work = Path(tempfile.mkdtemp()) / "tuned"
print(this_machine())

# %% [markdown]
# ## Before
#
# What the cost model decides, and what it takes here:

# %%
predicted = tf.plan(module)
print(predicted)
untuned = bench(module, predicted)
print(untuned)
assert all(group.evidence == "predicted" for group in predicted.groups)

# %% [markdown]
# ## Tune
#
# The command line is `tvm-fusion tune model.onnx --work-dir tuned --trials 40`. `report` is called after each
# batch; here it keeps what the kernels of the plan of the moment take.

# %%
curve = []


def note(session):
    """Keep the number of trials so far and what the kernels of the plan of the moment take."""
    if session.calls:
        curve.append((session.tuner.trials, sum(k.best_us * n for k, n in session.calls)))


started = time.perf_counter()
plan = tf.tune(module, "llvm", work, trials=TRIALS, report=note)
first = time.perf_counter() - started
print(f"{first:.0f} s")
print(plan)
measured = [group for group in plan.groups if group.evidence == "measured"]
# Else the whole model was faster as it was before, or by TVM's own pipeline.
if plan.pipeline == "tvm_fusion":
    assert len(measured) == len(plan.groups)

# %% [markdown]
# Every trial is a line in a file: which kernel, which template, what it decided, whether the result was
# right, and how long it took. Wrong results never count, however fast.

# %%
(place,) = WorkDir(work).places()
records = place.records()
rows = []
for kernel in records.kernels():
    best = records.best(kernel)
    if best is not None:
        rows.append(
            (" + ".join(best.operators), best.template, f"{np.median(best.samples_us):.1f}")
        )
table(("kernel", "template", "best µs"), rows)


def on_record():
    """The lines of the file of trials."""
    text = (place.folder / "trials.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


known = {line["trial"] for line in on_record()}
verdicts = [line["verdict"] for line in on_record()]
print(", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts))))
assert len(known) >= 20 and "ok" in verdicts

# %%
assert len(curve) >= 2 and curve[-1][0] >= 20
fig, axis = plt.subplots()
axis.step(*zip(*curve, strict=True), where="post", color=AFTER, label="plan of the moment")
axis.set_xlabel("trials")
axis.set_ylabel("sum of the kernels' best times (µs)")
axis.set_ylim(bottom=0)
axis.legend()
caption(f"What the best plan so far would take. {this_machine()}.")

# %% [markdown]
# ## Go on
#
# Ctrl-C stops a run with the best so far, and the same call goes on. No trial on record is repeated. With the
# budget spent already, only kernels that the planner asks about and that were never measured are tried, and
# the whole model is timed. (A kernel whose last round did not come about the first time, because the machine was
# too busy, may have it now: its two or three fastest are measured side by side, and one of them is `settled`.)

# %%
started = time.perf_counter()
again = tf.tune(module, "llvm", work, trials=TRIALS)
print(f"{time.perf_counter() - started:.0f} s instead of {first:.0f}")
new = on_record()[len(verdicts) :]
last_rounds = {line["date"] for line in new if line.get("settled")}
repeated = [n for n in new if n["trial"] in known and n["date"] not in last_rounds]
print(f"{len(new)} lines more, {len(repeated)} trials repeated")
assert not repeated

# %% [markdown]
# ## In continuous integration
#
# `require_cached` measures nothing. Where a kernel of the plan is not on record, it is an error, not a guess:

# %%
cached = tf.tune(module, "llvm", work, require_cached=True)
assert [group.nodes for group in cached.groups] == [group.nodes for group in again.groups]
try:
    tf.tune(cross_pair(size=20), "llvm", work, require_cached=True)
except TuningError as error:
    print(f"refused: {error}")
else:
    raise AssertionError("another shape has other kernels, which were never measured")

# %% [markdown]
# ## Use it
#
# `compile` with the work dir takes the decisions and the schedules from there. The result is compared with
# the untuned one.

# %%
tuned, plain = tf.compile(module, work_dir=work), tf.compile(module)
rng = np.random.default_rng(0)
inputs = [rng.standard_normal(spec.shape).astype(spec.dtype) for spec in plain.signature.inputs]
np.testing.assert_allclose(tuned(*inputs)[0], plain(*inputs)[0], rtol=1e-4, atol=1e-4)
times = {"untuned": plain, "tuned": tuned}
medians = {
    name: np.median(model.time(*inputs, number=50, repeat=9)) * 1e6 for name, model in times.items()
}
print(this_machine())
table(
    ("", "kernels", "µs"),
    [(n, m.plan.totals.launches_after, f"{medians[n]:.0f}") for n, m in times.items()],
)

# %% [markdown]
# ## On a GPU, and over RPC
#
# ```sh
# tvm-fusion tune model.onnx --work-dir tuned --target cuda --dtype float16 --minutes 20 --html tuning.html
# ```
#
# compiles on the cores and measures on the GPU; `--devices 0,1` on two. For a GPU elsewhere, plain TVM
# serves:
#
# ```sh
# python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190
# python -m tvm.exec.rpc_server --tracker HOST:9190 --key h200
# tvm-fusion tune model.onnx --work-dir tuned --target cuda:sm_90a --rpc HOST:9190 --key h200
# ```
#
# These need hardware, so they are not run here; `docs/tuning.md` has the details. What was recorded of the first, for
# three networks in float16: the kernels' first guesses, and what tuning found.

# %%
gpu = recorded("h200-tuned.json")
print(source(gpu))
networks = [r for r in gpu["rows"] if r["name"].startswith(("resnet", "mobilenet"))]
rows = []
for r in networks:
    guess, best = r["untuned_us"], r["ours_us"]
    rows.append(
        (r["name"], f"{r['unfused_us']:.0f}", f"{guess:.0f}", f"{best:.0f}", f"{guess / best:.2f}")
    )
table(("network", "unfused µs", "fused, untuned µs", "fused, tuned µs", "× by tuning"), rows)
assert len(rows) == 3 and all(r["ours_us"] < r["untuned_us"] for r in networks)

# %% [markdown]
# ## Reading it honestly
#
# - Forty trials on a busy machine with few cores find little, and what they find is as noisy as the clock: do
#   not be surprised if *tuned* is no faster than *untuned* above. A network on a GPU of its own wants a
#   thousand. What matters here is that each decision can be traced to a measurement.
# - The sum of the kernels' times is not the time of the model: launches and the machine's other work come on
#   top. That is why the whole model is timed last, and why it decides: where it is faster without groups, without
#   what was tuned or by TVM's own pipeline, by more than the noise, `tune` and `compile` keep to that.
# - Records count for this kind of processor, this arch and this version of TVM, and for no other.
