"""Relay modules compiled for CUDA without a GPU: one kernel per group, no spills; their code on the emulator.

What runs them on a GPU is tests/gpu/test_relay_on_gpu.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.compat import structural_equal
from tvm_fusion.frontend import relay
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.relay_fixtures import read_arrays, read_document
from tvm_fusion.transform import StripFusion

DATA = Path(__file__).parent / "data"
MODELS = sorted({path.name.rpartition("_")[0] for path in DATA.glob("*_16.json.gz")})
NETWORKS = sorted(path.name.removesuffix(".npz") for path in (DATA / "networks").glob("*.npz"))

ARCH = "sm_90a"


def groups_in(mod) -> int:
    """How many functions a module has beside main."""
    return len(mod.get_global_vars()) - 1


def check_kernels(mod) -> tf.CompiledModel:
    """Compile a module; every group must be one kernel, and no kernel may spill."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a group that is left unfused is one
        compiled = tf.compile(mod, f"cuda:{ARCH}", verify=False)
    found: dict[str, int] = {}
    for source in compiled.cuda_sources():
        taken = kernel_resources(source, ARCH)
        found |= {kernel: resources.spill_bytes for kernel, resources in taken.items()}
    assert set(compiled.kernels) == {group.id for group in compiled.plan.groups}
    for group, name in compiled.kernels.items():
        assert sum(kernel.startswith(f"{name}_kernel") for kernel in found) == 1, group
    assert not any(found.values()), {kernel: size for kernel, size in found.items() if size}
    return compiled


@pytest.mark.parametrize("name", MODELS)
def test_versions_are_read_into_the_same_module(name):
    """What is shown of the module of one version holds for those of the others."""
    first, *others = (
        relay.from_document(read_document(DATA / f"{name}_{version}.json.gz"))
        for version in ("08", "09", "16")
    )
    assert all(structural_equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("name", MODELS)
def test_fixture_compiles(name):
    mod = relay.from_document(read_document(DATA / f"{name}_16.json.gz"))
    compiled = check_kernels(mod)
    if name == "annotated":
        assert len(compiled.plan.groups) == groups_in(mod) == 3
        check_kernels(StripFusion()(mod))


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("name", NETWORKS)
def test_network_compiles(name):
    mod = relay.from_document(read_document(DATA / "networks" / f"{name}_annotated_16.json.gz"))
    assert len(check_kernels(mod).plan.groups) == groups_in(mod)
    # Planned here, with what the compiler says of each kernel, the groups may be others.
    assert len(check_kernels(StripFusion()(mod)).plan.groups) > groups_in(mod) / 2


# Sorting is left to TVM's own kernels, several to a function, which the emulator does not run.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "indexing"])
def test_fixture_on_the_emulator(name):
    """The generated CUDA code gives Relay's numbers."""
    mod = relay.from_document(read_document(DATA / f"{name}_16.json.gz"))
    inputs, expected = read_arrays(DATA / f"{name}.npz")
    names = [param.name for param in mod["main"].params]
    given = [inputs.get(n, inputs.get(n.rpartition("_")[0])) for n in names]
    results = EmulatedPlan(mod, parse_target(f"cuda:{ARCH}"))(*given)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.dtype
        scale = max(float(np.abs(want.astype("float64")).max()), 1e-6)
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)
