"""Products whose operands the copy engine brings: values, what it takes, machine code, and who may choose it."""

from __future__ import annotations

import dataclasses
import random

import pytest
import tvm
from tvm import relax
from tvm_fusion.schedules.base import MEMBER, PACKED
from tvm_fusion.schedules.cuda.tensor_core.bulk import bulk_kernel
from tvm_fusion.schedules.cuda.tensor_core.bulk_operand import bulk_operands
from tvm_fusion.schedules.cuda.tensor_core.packing import pack
from tvm_fusion.schedules.cuda.tensor_core.recognition import products
from tvm_fusion.schedules.cuda.tensor_core.template import TensorCore
from tvm_fusion.schedules.decisions import deciding, recording

from tvm_fusion.build import tir_pipeline
from tvm_fusion.build.ptxas import assemble
from tvm_fusion.devices import DEVICES
from tvm_fusion.errors import LoweringError
from tvm_fusion.guards.bulk_tiles import BulkTile, bulk_choices
from tvm_fusion.guards.tensor_tiles import Problem
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation, sass
from tvm_fusion.testing.bulk_models import compile_with_tile, feed_forward

op = relax.op
DEVICE = DEVICES["sm_90"]
#: So few blocks that each takes several tiles.
FEW = dataclasses.replace(DEVICE, multiprocessors=2)
TARGET = parse_target("cuda:sm_90a")


def with_epilogue(emit, x, w, b, r):
    """Bias, GELU and residual."""
    return emit(op.add(emit(op.nn.gelu(emit(op.add(emit(op.matmul(x, w)), b)))), r))


def product(tensor, rows: int, depth: int, columns: int, dtype: str = "float16", constants=(1, 2)):
    """A product with an epilogue, its weights constant or not."""
    shapes = ((rows, depth), (depth, columns), (columns,), (rows, columns))
    return tensor.function(with_epilogue, *shapes, dtype=dtype, constants=constants)


def kernel(
    function, columns: int, stages: int, bulk: int, device=FEW, rows: int = 128, turns: int = 1
):
    """The kernel of a tile."""
    form, packed = pack(products(function.func), set(function.constants))
    tile = BulkTile(rows, columns, 64, 8 // turns, 1, 1, stages, bulk=bulk, turns=turns)
    made = bulk_kernel(form, tile, device)
    made = made.without_attr("global_symbol")
    return made.with_attr(PACKED, packed) if packed else made


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tile", "dtype"),
    [
        ((200, 72, 160), (64, 3, 4), "float16"),
        ((136, 328, 104), (96, 4, 1), "bfloat16"),
        ((64, 64, 256), (256, 3, 4), "float16"),
    ],
    ids=["tails everywhere", "odd columns", "one tile"],
)
def test_values(tensor, shape, tile, dtype):
    function = product(tensor, *shape, dtype=dtype)
    tensor.check(function, kernel(function, *tile), arch="sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_values_of_random_shapes(tensor, seed):
    draw = random.Random(seed)
    shape = draw.randint(1, 300), 8 * draw.randint(2, 40), 8 * draw.randint(1, 40)
    rows, turns = draw.choice([(128, 1), (256, 1), (64, 2), (128, 2)])
    most = 128 * 128 * 2 // turns // rows
    columns = draw.choice([c for c in (64, 96, 128, 192, 256) if c <= most])
    bulk = 4 if shape[2] % 32 == 0 else 1
    function = product(tensor, *shape, dtype=draw.choice(["float16", "bfloat16"]))
    made = kernel(function, columns, 3, bulk, FEW, rows, turns)
    tensor.check(function, made, arch="sm_90a")


def test_batches_and_heads_are_axes_of_the_map(tensor):
    """Heads that lie side by side in one tensor, and a batch around them."""

    def build(emit, q, k):
        q, k = (emit(op.permute_dims(x, [0, 2, 1, 3])) for x in (q, k))
        return emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))

    function = tensor.function(build, (2, 40, 3, 64), (2, 72, 3, 64))
    rows, columns = bulk_operands(products(function.func))
    assert [step for _, step in rows.batch] == [64, 40 * 192]
    assert [step for _, step in columns.batch] == [64, 72 * 192]
    tensor.check(function, kernel(function, 64, 3, 1), arch="sm_90a")


# ---- what the copy engine takes ---------------------------------------------------------------------


def test_weights_that_are_inputs_are_taken_as_they_lie(tensor):
    """Where weights are no constants, nobody packs them: their columns are innermost."""
    function = product(tensor, 136, 72, 160, constants=())
    _, columns = bulk_operands(products(function.func))
    assert columns.is_transposed and (columns.depth_step, columns.line_step) == (160, 1)
    tensor.check(function, kernel(function, 64, 3, 1), arch="sm_90a")
    with pytest.raises(ValueError, match="tensor maps"):
        kernel(function, 64, 3, 4)
    own = [option for option in options(function, TARGET) if "tile.bulk" in option]
    assert own and all(o["tile.bulk"] == 1 and o["tile.columns"] % 64 == 0 for o in own)


def test_a_pointwise_convolution_is_taken(tensor):
    def build(emit, x, w):
        return emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))

    function = tensor.function(build, (2, 7, 9, 64), (48, 1, 1, 64), constants=(1,))
    rows, _ = bulk_operands(pack(products(function.func), {1})[0])
    assert (rows.lines, rows.line_step, rows.depth) == (126, 64, 64)
    tensor.check(function, kernel(function, 64, 3, 1), arch="sm_90a")


REFUSED = {
    "a stride that is no multiple of 16 bytes": (
        lambda emit, x, w: emit(op.matmul(x, op.permute_dims(w))), (64, 36), (32, 36),
    ),
    "columns that are no multiple of 16 bytes": (
        lambda emit, x, w: emit(op.matmul(x, w)), (64, 64), (64, 36),
    ),
    "padding": (
        lambda emit, x, w: emit(
            op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
        ), (1, 8, 8, 64), (32, 3, 3, 64),
    ),
    "an operand that is computed": (
        lambda emit, x, w: emit(op.matmul(emit(op.nn.relu(x)), op.permute_dims(w))),
        (64, 64), (32, 64),
    ),
    "two products": (
        lambda emit, x, w: emit(
            op.add(emit(op.nn.relu(emit(op.matmul(x, op.permute_dims(w))))),
                   emit(op.matmul(x, op.permute_dims(w))))
        ), (64, 64), (64, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_other_functions_are_left_alone(tensor, case):
    build, *shapes = case
    form = products(tensor.function(build, *shapes).func)
    assert form is not None
    assert bulk_operands(form) is None
    with pytest.raises(ValueError, match="tensor maps"):
        bulk_kernel(form, BulkTile(128, 64, 64, 8, 1, 1, 3), DEVICE)


# ---- machine code ----------------------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("rows", "columns", "turns"),
    [(128, 128, 1), (128, 256, 1), (256, 128, 1), (128, 128, 2), (64, 256, 2)],
)
def test_nothing_spills_and_the_chips_own_instructions_are_there(tensor, rows, columns, turns):
    function = product(tensor, 512, 512, 512)
    made = kernel(function, columns, 4, 4, DEVICE, rows, turns)
    used = tensor.resources(made, "sm_90a")
    # What 384 threads have at the start; setmaxnreg divides it anew.
    assert used.registers == 168
    source = cuda_emulation.cuda_source(made, TARGET)
    if sass.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    code, _ = assemble(source, "sm_90a")
    (instructions,) = sass.disassemble(code).values()
    names = [part for line in instructions for part in line.split()]
    assert any(name.startswith(f"HGMMA.64x{columns}x16") for name in names)
    assert {"UTMALDG.2D", "UTMALDG.5D"} <= {name.rstrip("(") for name in names}
    assert any(name.startswith("USETMAXREG") for name in names)
    assert not any(name.startswith(("LDL", "STL")) for name in names)


@pytest.mark.nvcc
def test_transposed_operands_spill_nothing_either(tensor):
    function = product(tensor, 512, 512, 512, constants=())
    assert tensor.resources(kernel(function, 128, 4, 1, DEVICE, 128, 2), "sm_90a").registers == 168


@pytest.mark.nvcc
def test_the_host_makes_the_maps(tensor, tmp_path):
    """The exported library calls CUDA's driver through TVM's runtime, and takes the function's own parameters."""
    function = product(tensor, 256, 128, 256)
    named = kernel(function, 128, 4, 4, DEVICE).with_attrs(
        {"global_symbol": "kernel", "tirx.is_scheduled": True}
    )
    built = tvm.compile(
        tvm.IRModule({"kernel": named}), target=TARGET, tir_pipeline=tir_pipeline.NAME
    )
    path = tmp_path / "kernel.so"
    built.export_library(str(path))
    assert b"cuTensorMapEncodeTiled" in path.read_bytes()


@pytest.mark.nvcc
def test_a_whole_model_is_exported_with_it(tmp_path):
    """As tuning's records would have it: planned, packed, scheduled with a decision, and one kernel."""
    compiled = compile_with_tile(
        feed_forward(2000, 768, 1016), BulkTile(128, 128, 64, 4, 1, 1, 4, bulk=1, turns=2)
    )
    compiled.export(tmp_path / "model.so")
    code = (tmp_path / "model.so").read_bytes()
    assert b"tvmf_bulk_load_5" not in code and b"tvmf_bulk_load_2" in code
    assert b"cuTensorMapEncodeTiled" in code


@pytest.mark.parametrize("shape", [(600, 520, 776), (1999, 776, 1016), (4000, 64, 3104)])
def test_tuning_finds_it_among_many_tiles(shape):
    tile = BulkTile(128, 128, 64, 4, 1, 1, 4, bulk=1, turns=2)
    compiled = compile_with_tile(feed_forward(*shape), tile)
    assert len(compiled.cuda_kernels()) == 1
    with pytest.raises(LoweringError, match="another tile"):
        compile_with_tile(feed_forward(*shape), dataclasses.replace(tile, stages=9))


# ---- who may choose it -----------------------------------------------------------------------------


def options(function, target) -> list[dict]:
    """What tuning may choose for a function, in the order of the model; empty for another template's."""
    with recording() as points:
        assert TensorCore().apply(function.func, target) is not None
    return [dict(option) for point in points if point.name == "tile" for option in point.options]


def is_bulk(option: dict) -> bool:
    return "tile.bulk" in option


def source_of(function, target) -> str:
    return cuda_emulation.cuda_source(TensorCore().apply(function.func, target), target)


@pytest.mark.parametrize("rows", [2048, 1000, 4096])
def test_large_products_have_it(tensor, rows):
    function = product(tensor, rows, 2048, 4096)
    assert "tvmf_bulk_load" in source_of(function, TARGET)
    found = options(function, TARGET)
    assert is_bulk(found[0])
    others = [option for option in found if not is_bulk(option)]
    assert others  # tuning measures them, too
    with deciding(tuple(others[0].items())):
        assert "tvmf_bulk_load" not in source_of(function, TARGET)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(128, 768, 768), (64, 4096, 64), (16, 512, 512)]
)
def test_small_products_have_what_is_predicted_to_be_faster(tensor, rows, depth, columns):
    function = product(tensor, rows, depth, columns)
    assert "tvmf_bulk_load" not in source_of(function, TARGET)


def test_options_are_in_the_order_of_their_times(tensor):
    function = product(tensor, 1024, 1024, 1024)
    with recording() as points:
        TensorCore().apply(function.func, TARGET)
    (point,) = [point for point in points if point.name == "tile"]
    assert {is_bulk(dict(option)) for option in point.options} == {True, False}
    assert list(point.microseconds) == sorted(point.microseconds)


def test_no_other_chip_and_no_member_has_it(tensor):
    function = product(tensor, 4096, 1024, 4096)
    for text in ("cuda:sm_90", "cuda:sm_80", "cuda:sm_100"):
        target = parse_target(text)
        assert not any(map(is_bulk, options(function, target)))
        assert "tvmf_bulk_load" not in source_of(function, target)
    member = dataclasses.replace(function, func=function.func.with_attr(MEMBER, True))
    assert not any(map(is_bulk, options(member, TARGET)))


def test_tiles_fit_the_chip():
    problem = Problem(4096, 4096, 1, (4096,), (1,), reduction_inner=True)
    found = bulk_choices(problem, DEVICE, 1000)
    assert {choice.tile.columns for choice in found} == {64, 96, 128, 192, 256}
    for choice in found:
        assert choice.tile.shared_bytes(problem) + 1024 <= DEVICE.shared_memory_per_block_optin
        assert choice.tile.block_threads == 384
        assert choice.tile.grid(problem, DEVICE) <= DEVICE.multiprocessors
        assert choice.microseconds > 2 * 4096**3 / 990e12 * 1e6
    odd = Problem(4096, 4104, 1, (4096,), (1,), reduction_inner=True)
    assert all(choice.tile.bulk == 1 for choice in bulk_choices(odd, DEVICE, 1000))
    assert not bulk_choices(problem, DEVICES["sm_80"], 1000)
    assert not bulk_choices(dataclasses.replace(problem, copies=(2,)), DEVICE, 1000)
