"""Models whose product is a kernel of the copy engine, whatever the cost model would choose, for tests."""

from __future__ import annotations

from ..build.model import CompiledModel, compile_model
from ..compat import Target, relax, tirx, tvm
from ..errors import LoweringError
from ..guards.bulk_tiles import BulkTile
from ..schedules.decisions import Decision
from ..schedules.registry import deciding_by
from ..targets import parse_target
from .modules import ModuleBuilder


def feed_forward(rows: int, depth: int, columns: int, dtype: str = "float16") -> tvm.IRModule:
    """A product with bias, GELU and residual; its inputs are the activations and the residual."""
    op, builder = relax.op, ModuleBuilder(dtype)
    x, residual = builder.input("x", (rows, depth)), builder.input("residual", (rows, columns))
    weights = builder.const(depth, columns, scale=depth**-0.5)
    value = builder.op("product", op.matmul(x, weights))
    value = builder.op("bias", op.add(value, builder.const(columns)))
    value = builder.op("gelu", op.nn.gelu(value))
    return builder.finish(builder.op("sum", op.add(value, residual)))


def compile_with_tile(
    module: tvm.IRModule, tile: BulkTile, target: str = "cuda:sm_90"
) -> CompiledModel:
    """Compile a model each of whose kernels has a tile.

    Raises
    ------
    LoweringError
        If the model is not one kernel that may have the tile.
    """
    decision: Decision = tuple(
        (f"tile.{name}", int(getattr(tile, name))) for name in BulkTile.__dataclass_fields__
    )

    def lookup(func: tirx.PrimFunc, _: Target) -> tuple[str, Decision]:
        return "tensor_core", decision

    with deciding_by(lookup):
        compiled = compile_model(module, parse_target(target))
    # A decision that is no option is left to the cost models, as tuned records of other versions are.
    if not all("tvmf_bulk_load" in source for source in compiled.cuda_sources()):
        raise LoweringError(f"a kernel of this model cannot have {tile}; choose another tile")
    return compiled
