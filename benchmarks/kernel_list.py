"""The kernels of a model, fused and unfused: what each computes, what is predicted for it, its PrimFunc."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

import tvm_fusion as tf
from tvm_fusion import frontend
from tvm_fusion.build.model import Lowered, lower_plan, unfused_plan
from tvm_fusion.compat import relax, structural_hash, tirx
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import device_for
from tvm_fusion.errors import LoweringError
from tvm_fusion.frontend import onnx as onnx_frontend
from tvm_fusion.frontend import torch as torch_frontend
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.graph.dataflow import DataflowGraph
from tvm_fusion.graph.relax import RelaxGraph, from_relax
from tvm_fusion.guards.footprint import footprint
from tvm_fusion.guards.needs import kind_of
from tvm_fusion.pipeline import after_scheduling, before_lowering
from tvm_fusion.planner.assemble import proposals_of
from tvm_fusion.planner.cost import fused_cost
from tvm_fusion.planner.plan import Plan
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import with_variant
from tvm_fusion.testing.models import LIGHT_MODELS, light_model
from tvm_fusion.testing.named_blocks import NAMED_BLOCKS, named_block
from tvm_fusion.transform.annotate import annotate
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.transform.schedule_groups import TEMPLATE, schedule_functions

#: Networks of ``tvm_fusion.testing.torch_models``.
TORCH_MODELS = ("mobilenet_v2",)


@dataclasses.dataclass
class Kernel:
    """One distinct kernel: its row of the table, its function and how many results it writes."""

    row: dict[str, Any]
    func: Any
    outputs: int


def load_model(name: str, dtype: str) -> tvm.IRModule:
    """Load a model file, a light model, a torch model of the tests or a block, in a dtype.

    Raises
    ------
    ValueError
        If the name is none of these.
    """
    if name in NAMED_BLOCKS:
        return named_block(name, dtype)
    if name in LIGHT_MODELS:
        return onnx_frontend.load(light_model(name), dtype=dtype)
    if name in TORCH_MODELS:
        from tvm_fusion.testing.torch_models import exported  # needs PyTorch

        return torch_frontend.load(exported(name), dtype=dtype)
    if Path(name).is_file():
        return frontend.load(name, dtype=dtype)
    choices = ", ".join([*LIGHT_MODELS, *TORCH_MODELS, *NAMED_BLOCKS])
    raise ValueError(f"{name!r} is no file and none of {choices}")


def prepare(module: tvm.IRModule, target: Any) -> tvm.IRModule:
    """Return the canonical module as ``compile_model`` plans it."""
    with target:
        return tvm.transform.Sequential(before_lowering())(canonicalize(module))


def kernels_of(
    name: str, module: tvm.IRModule, target: Any, config: FusionConfig | None = None
) -> Iterator[Kernel]:
    """Yield the kernels of a model's plan, of its vertical plan, and of one kernel per operator.

    Parameters
    ----------
    name : str
        Name of the model in the rows.
    module : tvm.IRModule
        A Relax module.
    target : Target
        Complete target.
    config : FusionConfig, optional
        Strategies and limits of the plan.
    """
    module = prepare(module, target)
    found = from_relax(module)
    config = config or FusionConfig()
    plan = tf.plan(module, target, config, name=name)
    narrow = dataclasses.replace(config, strategies=("vertical",))
    for side in (plan, tf.plan(module, target, narrow, name=name), unfused_plan(plan)):
        yield from kernels_of_lowered(name, found, lower_plan(module, side, target), target)


def kernels_of_lowered(
    name: str, found: RelaxGraph, lowered: Lowered, target: Any
) -> Iterator[Kernel]:
    """Yield each kernel that a lowered module calls, once per distinct function."""
    mod, graph = _scheduled(lowered.mod, target), found.graph
    proposals = proposals_of(lowered.plan, graph)
    groups = {
        lowered.kernels[group.id]: proposal
        for group, proposal in zip(lowered.plan.groups, proposals, strict=True)
    }
    alone = _operators_alone(found, lowered.plan)
    kernels: dict[str, Kernel] = {}
    for binding in mod["main"].body.blocks[0].bindings:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op != tvm.ir.Op.get("relax.call_tir"):
            continue
        kernel, func = call.args[0].name_hint, mod[call.args[0]]
        nodes = alone.get(binding.var.name, [])
        node = nodes.pop(0) if kernel not in groups and nodes else None
        if relax.analysis.has_reshape_pattern(func):
            continue
        if kernel in kernels:
            kernels[kernel].row["calls"] += 1
            continue
        if kernel not in groups and node is None:
            continue  # what a rewrite computes at run time besides its group
        proposal = groups[kernel] if kernel in groups else _alone(graph, node)
        what = _proposal_row(graph, proposal, target)
        outputs = len(call.ty.fields) if isinstance(call.ty, tvm.ir.TupleType) else 1
        kernels[kernel] = Kernel(_row(name, kernel, func, outputs, what), func, outputs)
    yield from kernels.values()


def _operators_alone(found: RelaxGraph, plan: Plan) -> dict[str, list[str]]:
    """Operators outside groups by the name of the variable that they bind.

    Operators of one source node bind variables of one name, in the order of the graph.
    """
    inside = {node for group in plan.groups for node in group.nodes}
    out: dict[str, list[str]] = {}
    for node, bindings in found.bindings.items():
        if node not in inside:
            out.setdefault(bindings[0].var.name, []).append(node)
    return out


def kernel_of_proposal(name: str, module: tvm.IRModule, proposal: Proposal, target: Any) -> Kernel:
    """Lower one proposal of a prepared module as one kernel, whatever the planner thinks of it.

    Raises
    ------
    LoweringError
        If it cannot be one kernel.
    """
    found = from_relax(module)
    lowered, kernels = lower_groups(annotate(module, found, {"fused": proposal}))
    scheduled, failures = schedule_functions(lowered, with_variant(target))
    if failures:
        raise LoweringError("; ".join(failures.values()))
    func, outputs = (
        scheduled[kernels["fused"]],
        len(found.graph.external_outputs(proposal.operators)),
    )
    what = _proposal_row(found.graph, proposal, target)
    return Kernel(_row(name, "fused", func, outputs, what), func, outputs)


def _scheduled(mod: tvm.IRModule, target: Any) -> tvm.IRModule:
    """Give functions that no template took the default schedule that a compiled model gets."""
    if target.kind.name != "cuda":
        return mod
    with target:
        return after_scheduling(target)[0](mod)


def _row(
    name: str, kernel: str, func: Any, outputs: int, what: Mapping[str, Any]
) -> dict[str, Any]:
    """What is known of a kernel from its function, and ``what`` is known from the graph."""
    written = [math.prod(int(d) for d in p.ty.shape) for p in func.params[-outputs:]]
    return {
        "model": name,
        "kernel": kernel,
        # 48 bits tell a few thousand kernels apart.
        "hash": f"{structural_hash(func) & (2**64 - 1):016x}"[:12],
        "template": str(func.attrs.get(TEMPLATE, "tvm")),
        "calls": 1,
        "out": max(written),
        **what,
        **launch_of(func),
    }


def _proposal_row(graph: DataflowGraph, proposal: Proposal, target: Any) -> dict[str, Any]:
    """What the graph and the cost model know of one kernel."""
    device = device_for(target)
    cost, needs = fused_cost(graph, proposal, device), footprint(graph, proposal, device)
    options = dict(proposal.options)
    return {
        "strategy": proposal.strategy,
        "form": options.pop("form", ""),
        "options": options,
        "nodes": list(proposal.operators),
        "ops": [graph.by_name[n].op for n in proposal.operators],
        **_kind(graph, proposal.operators),
        "members": len(proposal.members),
        "anchors": sum(graph.by_name[n].pattern == "anchor" for n in proposal.operators),
        "flops": cost.flops,
        "bytes": cost.nbytes,
        "predicted_us": round(cost.microseconds, 4),
        "predicted_grid": needs.blocks,
        "predicted_threads": needs.threads,
        "predicted_registers": needs.registers,
        "predicted_shared": needs.shared_bytes,
    }


def _alone(graph: DataflowGraph, node: str) -> Proposal:
    """One operator as the cost model takes it when it is a kernel of its own."""
    anchors = (node,) if kind_of(graph.by_name[node]) != "pointwise" else ()
    return Proposal("unfused", (node,), anchors, ((node,),))


def _kind(graph: DataflowGraph, nodes: Sequence[str]) -> dict[str, str]:
    """Kind of kernel and element type, as the cost model counts them."""
    operators = [graph.by_name[n] for n in nodes]
    anchors = [o for o in operators if o.pattern == "anchor"] or operators
    kind = kind_of(max(anchors, key=lambda o: o.flops))
    return {"kind": kind, "dtype": graph.tensors[anchors[0].outputs[0]].dtype}


def launch_of(func: Any) -> dict[str, int]:
    """Blocks and threads per block that a scheduled function launches (0 on a CPU)."""
    extents: dict[str, int] = {}

    def note(tag: str, extent: Any) -> None:
        if isinstance(extent, tirx.IntImm):
            extents[tag] = max(extents.get(tag, 1), int(extent))

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None:
            note(str(node.thread_binding.thread_tag), node.extent)

    def attribute(node: tirx.AttrStmt) -> None:
        if node.attr_key == "thread_extent":
            note(str(node.node.thread_tag), node.value)

    tvm_ffi.structural_walk(func.body, ((tirx.For, loop), (tirx.AttrStmt, attribute)))
    out = {}
    for key, prefix in (("grid", "blockIdx."), ("threads", "threadIdx.")):
        sizes = [n for tag, n in extents.items() if tag.startswith(prefix)]
        product = 1
        for size in sizes:
            product *= size
        out[key] = product if sizes else 0
    return out


def save_kernels(path: Path, kernels: list[Kernel]) -> None:
    """Write kernels with their functions, for measuring elsewhere with the same TVM."""
    data = [{"row": k.row, "outputs": k.outputs, "func": tvm.ir.save_json(k.func)} for k in kernels]
    path.write_bytes(lzma.compress(json.dumps(data).encode()))


def read_kernels(path: Path) -> list[dict[str, Any]]:
    """Read what `save_kernels` wrote; functions stay JSON text."""
    return json.loads(lzma.decompress(path.read_bytes()))
