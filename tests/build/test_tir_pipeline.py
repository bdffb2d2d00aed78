"""Launches that overlap, and passes that are left out: what differs from TVM's own pipeline, and what must not."""

from __future__ import annotations

import re

import pytest
import tvm_ffi
from tvm_fusion.schedules import schedule

from tvm_fusion.build import tir_pipeline
from tvm_fusion.build.cuda_source import COMPILE_HOOK, HOOK_LOCK, device_sources
from tvm_fusion.build.ordered_reads import ordered_reads
from tvm_fusion.build.ptxas import arch_of
from tvm_fusion.compat import Target, relax, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op
TAG = "tirx.use_programtic_dependent_launch"


def norm(emit, x, gamma, beta):
    return emit(op.nn.layer_norm(x, gamma, beta, axes=[-1]))


def norms(emit, x, y, gamma, beta):
    return [norm(emit, x, gamma, beta), norm(emit, y, gamma, beta)]


def gelu(emit, x, bias):
    return emit(op.nn.gelu(emit(op.add(x, bias))))


def pool(emit, x):
    return emit(op.nn.max_pool2d(x, (3, 3), padding=1, layout="NHWC"))


def mean(emit, x):
    return emit(op.mean(x, [1, 2]))


WAITING = {
    "rows": (norm, ((8, 256), (256,), (256,))),
    "partitioned": (norms, ((8, 256), (8, 256), (256,), (256,))),
    "elementwise": (gelu, ((64, 128), (128,))),
    "pooling": (pool, ((1, 8, 8, 16),)),
    "rows across": (mean, ((1, 7, 7, 64),)),
}


def scheduled(make, shapes, arch):
    target = parse_target(f"cuda:{arch}")
    func = group_function(group_module(shapes, "float16", lambda b, *i: make(b.emit, *i)))
    return schedule(func, target), target


def parameters(func, target) -> list[list[str]]:
    """Launch parameters of each kernel of a function, after the whole pipeline."""
    func = func.with_attr("global_symbol", "main").with_attr("target", target.with_host("llvm"))
    lower, _, device = tir_pipeline.pipeline()
    module = tvm.ir.transform.Sequential([lower])(tvm.IRModule({"main": func}))
    with Target(target, host="llvm"):
        module = device()(module)
    found = [f.attrs.get("tirx.kernel_launch_params") for f in module.functions.values()]
    return [[str(tag) for tag in tags] for tags in found if tags is not None]


@pytest.mark.parametrize("name", WAITING)
def test_memory_bound_kernels_overlap(name):
    (func, template), target = scheduled(*WAITING[name], "sm_90")
    assert template == name.split()[0]
    (tags,) = parameters(func, target)
    assert TAG in tags


def test_chips_without_it_launch_as_ever():
    (func, _), target = scheduled(*WAITING["rows"], "sm_80")
    (tags,) = parameters(func, target)
    assert TAG not in tags


@pytest.mark.parametrize("name", WAITING)
def test_nothing_is_touched_before_the_wait(name):
    """A kernel's code begins with the wait, in every branch; only then does it use a parameter."""
    (func, _), target = scheduled(*WAITING[name], "sm_90")
    source = cuda_emulation.cuda_source(func, target)
    body = source[source.rindex("__global__") :]
    body = body[body.index("{") :]
    params = re.findall(r"\b(\w+_ptr)\b", source[source.rindex("__global__") :].split("{")[0])
    assert params and "tvmf_let_next_start" in body
    first = min(body.index(f"{p} +") if f"{p} +" in body else len(body) for p in params)
    assert body.index("tvmf_wait_for_previous") < first
    branches = len(re.findall(r"tvmf_wait_for_previous\(\)", body))
    assert branches == (2 if name == "partitioned" else 1)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_the_size_of_shared_memory_stays_last(arch):
    """TVM's runtime refuses a launch in which anything follows it."""
    target = parse_target(f"cuda:{arch}")
    func = group_function(
        group_module(((64, 128), (128, 64)), "float16", lambda b, x, w: b.emit(op.matmul(x, w)))
    )
    (tags,) = parameters(schedule(func, target)[0], target)
    assert tags[-1] == "tirx.use_dyn_shared_memory"
    assert TAG in tags


def product(target):
    """A product of constants' shape, whose weights are packed so that warpgroups can read them."""
    func = group_function(
        group_module(((2048, 512), (512, 512)), "float16", lambda b, x, w: b.emit(
            op.matmul(x, b.emit(op.permute_dims(w)))))
    )  # fmt: skip
    return schedule(func, target)[0]


@pytest.mark.parametrize(("arch", "compiled"), [("sm_90", "sm_90"), ("sm_90a", "sm_90a")])
def test_only_a_target_with_the_variant_gets_its_instructions(arch, compiled):
    target = parse_target(f"cuda:{arch}")
    source = cuda_emulation.cuda_source(product(target), target)
    assert ("wgmma.mma_async" in source) == arch.endswith("a")
    plain = parse_target("cuda:sm_90")
    found = tir_pipeline.target_of(tvm.IRModule({"main": product(target)}), plain)
    assert str(found.attrs["arch"]) == compiled
    assert arch_of(source, "sm_90") == compiled


# Buffers are compacted only where there are any.


def convolution(emit, data, weight):
    """Of channels first: made by schedule primitives, whose buffers blocks allocate."""
    return emit(op.nn.conv2d(data, weight, padding=1))


BLOCKS = (convolution, ((1, 16, 9, 9), (24, 16, 3, 3)))


def kernels_of(functions, target, pipeline) -> list[str]:
    """CUDA kernels of some scheduled functions that one module holds, sorted."""
    named = {
        name: func.with_attrs({"global_symbol": name, "tirx.is_scheduled": True})
        for name, func in functions.items()
    }
    with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
        built = tvm.compile(tvm.IRModule(named), target=target, tir_pipeline=pipeline)
    (source,) = device_sources(built.mod)
    return sorted(part for part in re.split(r'(?=extern "C" __global__)', source) if "{" in part)


@pytest.fixture
def no_compiler():
    """TVM keeps the source, whatever compilers there are."""
    with HOOK_LOCK:
        real = tvm.get_global_func(COMPILE_HOOK)
        tvm_ffi.register_global_func(COMPILE_HOOK, lambda code: b"not compiled", override=True)
        yield
        tvm_ffi.register_global_func(COMPILE_HOOK, real, override=True)


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        (("written",), 1),
        (("blocks",), 1),
        (("written", "blocks", "pooling", "rows"), 4),
        (("written", "written_kernel"), 2),
    ],
)
def test_the_kernels_are_those_of_the_default_pipeline(no_compiler, monkeypatch, names, kernels):
    # Of maxima it makes others on purpose.
    monkeypatch.setattr(tir_pipeline, "PropagateNaN", lambda: tvm.transform.Sequential([]))
    target = parse_target("cuda:sm_90")
    made = {
        "written": product(target),
        "blocks": scheduled(*BLOCKS, "sm_90")[0][0],
        "written_kernel": scheduled(*BLOCKS, "sm_90")[0][0],
        "pooling": scheduled(*WAITING["pooling"], "sm_90")[0][0],
        "rows": scheduled(*WAITING["rows"], "sm_90")[0][0],
    }
    functions = {name: made[name] for name in names}
    found = kernels_of(functions, target, tir_pipeline.NAME)
    ordered = {name: ordered_reads(func) for name, func in functions.items()}
    assert found == kernels_of(ordered, target, "s_tir")
    assert sum("__global__" in part for part in found) >= kernels


def test_only_functions_without_buffers_to_compact_go_without_the_pass(monkeypatch):
    target = parse_target("cuda:sm_90")
    calls = []
    real = tvm.s_tir.pipeline.default_s_tir_pipeline()

    def watched(mod):
        without = tuple(map(str, tvm.transform.PassContext.current().disabled_pass))
        calls.append((sorted(gv.name_hint for gv in mod.functions), without))
        return real[0](mod)

    monkeypatch.setattr(tvm.s_tir.pipeline, "default_s_tir_pipeline", lambda: (watched, *real[1:]))
    functions = {"written": product(target), "blocks": scheduled(*BLOCKS, "sm_90")[0][0]}
    named = {
        name: func.with_attrs({"global_symbol": name, "target": target.with_host("llvm")})
        for name, func in functions.items()
    }
    tir_pipeline.LowerKernels()(tvm.IRModule(named))
    compact, only = "s_tir.CompactBufferAllocation", "tirx.AnnotateEntryFunc"
    assert sorted(calls) == [(["blocks"], (only,)), (["written"], (only, compact))]
    calls.clear()
    tir_pipeline.LowerKernels()(tvm.IRModule({"blocks": named["blocks"]}))
    tir_pipeline.LowerKernels()(tvm.IRModule({"written": named["written"]}))
    assert calls == [(["blocks"], ()), (["written"], (compact,))]
