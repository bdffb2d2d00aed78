"""Parallel branches as two launches: what their anchors merge into, and what follows these side by side."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax, tirx, tvm
from tvm_fusion.testing.modules import ModuleBuilder, kernel_calls
from tvm_fusion.testing.transformer_blocks import dense_norm_heads
from tvm_fusion.transform import Fuse, LowerGroups, StripFusion
from tvm_fusion.verification.reference import Reference

op = relax.op
TARGET = "cuda:sm_90"


def forms(fused):
    """Strategy, form and members of each group, and the operators of its body."""
    found = []
    for gv, func in fused.functions.items():
        if gv.name_hint != "main":
            options = dict(func.attrs["tvm_fusion.options"])
            names = {b.var.name.rstrip("0123456789") for b in func.body.blocks[0].bindings}
            names.discard("results")
            what = (func.attrs["tvm_fusion.strategy"], options["form"])
            found.append((*what, int(func.attrs["tvm_fusion.members"]), names))
    return sorted(found, key=lambda group: group[:2])


def test_products_and_norms_are_a_group_each():
    module = dense_norm_heads(heads=4, rows=32, width=1024, outputs=1024, dtype="float16")
    fused = Fuse(target=TARGET)(module)
    products, norms = forms(fused)
    assert products[:3] == ("compound", "merged", 4)
    assert norms == ("horizontal", "partitioned", 4, {"norm"})
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)


def test_one_branch_has_nobody_beside_it():
    module = dense_norm_heads(heads=1, rows=32, width=1024, outputs=1024, dtype="float16")
    fused = Fuse(target=TARGET)(module)
    assert not any(
        "partitioned" in str(f.attrs["tvm_fusion.options"])
        for gv, f in fused.functions.items()
        if gv.name_hint != "main"
    )


def residual_gelus(rows):
    """Products with an operand of each branch's own, which a merged product cannot hold."""
    b = ModuleBuilder("float16")
    x = b.input("x", (rows, 1024))
    results = []
    for i in range(3):
        y = b.add(f"sum{i}", b.dense(f"fc{i}", x, 1024), b.input(f"r{i}", (rows, 1024)))
        results.append(b.op(f"gelu{i}", op.nn.gelu(y)))
    return b.finish(*results)


def test_products_and_elementwise_chains_are_a_group_each():
    products, chains = forms(Fuse(target=TARGET)(residual_gelus(128)))
    assert products[:3] == ("compound", "merged", 3) and "fc" in products[3]
    assert chains == ("horizontal", "partitioned", 3, {"sum", "gelu"})


def test_long_chains_stay_with_their_products():
    """Where a merged product is no faster, writing and reading its results once more takes longer than products apart.

    On sm_90 it is faster: its operands are brought by the copy engine, which members of one kernel have not.
    """
    (group,) = forms(Fuse(target="cuda:sm_80")(residual_gelus(512)))
    assert group[:3] == ("compound", "partitioned", 3) and {"fc", "gelu"} <= group[3]


@pytest.mark.parametrize("relu", [False, True])
def test_two_kernels_of_the_right_values(relu):
    module = dense_norm_heads(heads=3, rows=16, width=256, outputs=512, dtype="float16", relu=relu)
    lowered = LowerGroups()(Fuse(target=TARGET)(module))
    assert len(kernel_calls(lowered)) == 2
    rng = np.random.default_rng(7)
    shapes = [[int(d) for d in p.ty.shape] for p in module["main"].params]
    arrays = [rng.standard_normal(s).astype("float16") for s in shapes]
    machine = relax.VirtualMachine(tvm.compile(lowered, target="llvm"), tvm.cpu())
    results = machine["main"](*[tvm.runtime.tensor(a) for a in arrays])
    for got, wanted in zip(results, Reference(module, "float16")(*arrays), strict=True):
        error = np.abs(got.numpy().astype("float64") - wanted).max()
        assert error < 4e-3 * np.abs(wanted).max()
    assert sum(isinstance(f, tirx.PrimFunc) for f in lowered.functions.values()) == 2
