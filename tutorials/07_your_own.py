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
# # 07 · Your own pass, your own strategy
#
# Fusion here is an annotation made by ordinary passes, so yours stand between them. And where the four
# strategies do not propose what you want, a strategy of your own can.
#
# **The claim.** A rewriting pass, a checking pass and a strategy, 15 lines each, work inside one
# `Sequential`: a model of 13 operators becomes 4 kernels, one for each of its layers and the softmax, and
# computes what NumPy computes.

# %%
import math
from collections import defaultdict

import numpy as np
import tvm
from lesson import bench, recorded, source, table, this_machine
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

import tvm_fusion as tf
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies import Proposal, Strategy
from tvm_fusion.strategies.base import depth_of
from tvm_fusion.testing.modules import ModuleBuilder

# %% [markdown]
# ## A model
#
# Three layers of a perceptron, with a tanh behind each: `layer0.fc`, `layer0.fc_bias`, `layer0.gelu`, … The
# names come from the model; importers keep those of the file.

# %%
ROWS, WIDTH, LAYERS = 64, 128, 3


rng = np.random.default_rng(3)
WEIGHTS = [
    (rng.standard_normal((WIDTH, WIDTH)) / math.sqrt(WIDTH), rng.standard_normal(WIDTH))
    for _ in range(LAYERS)
]


def perceptron():
    """Three layers of product, bias, GELU, tanh; and a softmax."""
    b = ModuleBuilder()
    x = b.input("x", (ROWS, WIDTH))
    for i, (weight, bias) in enumerate(WEIGHTS):
        y = b.op(f"layer{i}.fc", relax.op.matmul(x, b.array(weight)))
        y = b.op(f"layer{i}.fc_bias", relax.op.add(y, b.array(bias)))
        y = b.op(f"layer{i}.gelu", relax.op.nn.gelu(y))
        x = b.op(f"layer{i}.tanh", relax.op.tanh(y))
    return b.finish(b.op("head.softmax", relax.op.nn.softmax(x)))


module = perceptron()
before = tf.plan(module).totals.launches_before
assert before == 4 * LAYERS + 1

# %% [markdown]
# ## A pass that rewrites
#
# Exact GELU uses the error function; many networks were trained with the approximation by tanh. This pass
# changes one into the other: plain TVM, nothing of this package. It must run before fusion is decided, so
# that the plan counts what will be computed.


# %%
@mutator
class _Rewriter(PyExprMutator):
    """Replaces calls of ``relax.nn.gelu``."""

    def visit_call_(self, call):
        call = self.visit_expr_post_order(call)
        if call.op == tvm.ir.Op.get("relax.nn.gelu"):
            return relax.op.nn.gelu_tanh(call.args[0])
        return call


@tvm.transform.module_pass(opt_level=0, name="TanhGelu")
class TanhGelu:
    """GELU by tanh instead of erf."""

    def transform_module(self, mod, ctx):
        rewriter = _Rewriter(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(function))
        return rewriter.builder_.finalize()


rewritten = TanhGelu()(module)
operators = [o.op for o in from_relax(rewritten).graph.operators]
assert "gelu" not in operators and operators.count("gelu_tanh") == LAYERS

# %% [markdown]
# ## A pass that checks
#
# After `Fuse`, each group is a private function with attributes. A pass may read them, and stop the build:
# here, when a group is deeper than was agreed on.


# %%
@tvm.transform.module_pass(opt_level=0, name="CheckGroups")
class CheckGroups:
    """Lists the groups; an error for one that is too deep."""

    def __init__(self, most: int) -> None:
        self.most = most

    def transform_module(self, mod, ctx):
        for name, function in mod.functions_items():
            attrs = function.attrs or {}
            if "tvm_fusion.strategy" in attrs:
                depth = int(attrs["tvm_fusion.depth"])
                print(f"  {name.name_hint}: {attrs['tvm_fusion.strategy']}, depth {depth}")
                if depth > self.most:
                    raise ValueError(
                        f"{name.name_hint} has depth {depth}, at most {self.most} are allowed"
                    )
        return mod


# %% [markdown]
# ## A strategy
#
# A strategy reads the graph and yields proposals; it edits nothing and judges nothing. This one proposes each
# layer as one group, by the part of the name before the dot. Guards, cost and search treat its proposals like
# all others: what is illegal or does not pay is refused with a reason.


# %%
class ByLayer(Strategy):
    """One group for each prefix of names."""

    name = "vertical"  # what kind of group it is: decides how it is lowered

    def propose(self, graph, config):
        layers = defaultdict(list)
        for operator in graph.operators:
            layers[operator.name.split(".")[0]].append(operator.name)
        for names in layers.values():
            if len(names) > 1:
                chain = graph.sort(names)
                anchors = tuple(n for n in chain if graph.by_name[n].op == "matmul")
                yield Proposal(self.name, chain, anchors, (chain,), depth_of(graph, chain))


# %% [markdown]
# To see it alone, the built-in strategies are restricted to one that has nothing to do here.

# %%
config = tf.FusionConfig(strategies=("horizontal",))
assert not tf.plan(rewritten, config=config).groups
plan = tf.plan(rewritten, config=config, proposers=[ByLayer()])
table(("group", "operators"), [(g.id, ", ".join(g.nodes)) for g in plan.groups])
assert [g.nodes[0].split(".")[0] for g in plan.groups] == ["layer0", "layer1", "layer2"]
assert plan.totals.launches_after == LAYERS + 1  # and the softmax

# %% [markdown]
# What is illegal stays out, whoever proposes it: the first and the last layer in one kernel, without the one
# between them, have no order in which they could run.


# %%
class Around(ByLayer):
    """The first and the last layer as one group."""

    def propose(self, graph, config):
        first, _, last = super().propose(graph, config)
        chain = first.operators + last.operators
        yield Proposal(
            self.name, chain, first.anchors + last.anchors, (chain,), depth_of(graph, chain)
        )


refused = tf.plan(rewritten, config=config, proposers=[Around()])
assert not refused.groups
found = [r for r in refused.rejected if r.strategy == "vertical"]
print(f"{found[0].outcome}: {found[0].reason}: {found[0].detail}")
assert found[0].reason == "not_convex"

# %% [markdown]
# ## All in one pipeline

# %%
target = tvm.target.Target("llvm")
pipeline = tvm.transform.Sequential(
    [
        tf.transform.Canonicalize(),
        TanhGelu(),
        tf.transform.Fuse(config, proposers=[ByLayer()]),
        CheckGroups(most=4),
        tf.transform.LowerGroups(),
        tf.transform.ScheduleGroups(),
    ]
)
with target:
    lowered = pipeline(module)
kernels = [f for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
calls = str(lowered["main"]).count("R.call_tir(")
print(
    f"{before} operators, {calls} calls of {len(kernels)} kernels: the layers are alike and share one"
)
assert (calls, len(kernels)) == (LAYERS + 1, 2)

# %% [markdown]
# A limit that is too low stops the build:

# %%
fuse = tf.transform.Fuse(config, proposers=[ByLayer()])
strict = tvm.transform.Sequential([tf.transform.Canonicalize(), fuse, CheckGroups(most=3)])
try:
    with target:
        strict(module)
except ValueError as error:
    print(f"refused: {str(error).splitlines()[-1]}")
else:
    raise AssertionError("the check did not stop the build")

# %% [markdown]
# Plain TVM compiles what comes out. The reference is NumPy in float64, with the tanh form written out.

# %%
machine = relax.VirtualMachine(tvm.compile(lowered, target=target), tvm.cpu())
value = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype("float32")
found = machine["main"](tvm.runtime.tensor(value)).numpy()

y = value.astype("float64")
for weight, bias in WEIGHTS:
    y = y @ weight + bias
    y = np.tanh(0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))
y = np.exp(y - y.max(axis=-1, keepdims=True))
y /= y.sum(axis=-1, keepdims=True)
print(f"largest difference {np.abs(found - y).max():.1e}")
assert np.allclose(found, y, atol=1e-5)

# %% [markdown]
# ## Was it worth it?
#
# Your strategy against the built-in ones, and both against one kernel an operator:

# %%
print(this_machine())
rows = []
for name, chosen in (("ByLayer", plan), ("built in", tf.plan(rewritten))):
    result = bench(rewritten, chosen)
    rows.append(
        (
            name,
            chosen.totals.launches_after,
            f"{result.fused * 1e6:.0f}",
            f"{result.unfused * 1e6:.0f}",
        )
    )
table(("strategies", "kernels", "fused µs", "unfused µs"), rows)

# %% [markdown]
# ## On a GPU
#
# What a layer's kernel is worth there depends on its launches: the recorded row below is of another model, four
# heads of a product with bias and layer norm each, on 32 rows.

# %%
found = recorded("h200-figures.json")
print(source(found))
heads = [r for r in found["rows"] if r["name"] == "fcln4"]
rows = []
for r in heads:
    launches = [r["about"][name]["launches"] for name in ("unfused", "ours")]
    rows.append(
        (r["title"], r["dtype"], *launches, f"{r['unfused_us']:.1f}", f"{r['ours_us']:.1f}")
    )
table(("model", "dtype", "kernels", "fused", "unfused µs", "fused µs"), rows)
assert len(rows) == 2 and all(r["ours_us"] < r["unfused_us"] for r in heads)

# %% [markdown]
# ## Reading it honestly
#
# - The built-in strategies also take the softmax into the last layer's kernel, and need nothing from you. A
#   strategy of your own pays where you know something about the model that its graph does not say.
# - A proposal is a set of operators and a form. It can only become a kernel if a schedule template takes it;
#   a new *form* needs a template, too ([08](08_template.ipynb)).
# - The exact and the approximate GELU differ by up to 5e-4. The pass changes what the model computes, and
#   only you can know whether that is allowed.
