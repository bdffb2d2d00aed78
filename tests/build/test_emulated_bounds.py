"""No kernel of a plan touches memory beyond its arrays, which in the emulation are as large as their tensors.

On a GPU most such accesses go unseen: TVM's pool puts tensors side by side in larger allocations, so that even
compute-sanitizer has nothing to report. Here each kernel runs on arrays of the exact sizes, then once per array with
its last element cut off. That has to be found, unless the kernel has no use for the element (a slice): the ends of all
arrays are watched, vector and asynchronous loads included.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.modules import parallel_convs
from tvm_fusion.testing.transformer_blocks import bert_block, dense_norm_heads, llama_layer

#: Sizes that no tile divides.
BLOCKS = {
    # As in tests/gpu/test_sanitizer_on_gpu.py.
    "bert": lambda dtype: bert_block(sequence=40, hidden=128, heads=2, dtype=dtype),
    "heads": lambda dtype: dense_norm_heads(heads=3, rows=27, width=48, outputs=64, dtype=dtype),
    "llama": lambda dtype: llama_layer(sequence=27, hidden=64, heads=4, inner=88, dtype=dtype),
    "convolutions": lambda dtype: parallel_convs(
        4, channels=32, spatial=9, relu=True, dtype=dtype, layout="NHWC"
    ),
    "separate": lambda dtype: parallel_convs(
        3, channels=16, spatial=9, separate=True, dtype=dtype, layout="NHWC"
    ),
}
UNFUSED = tf.FusionConfig(deny=("*",))


def arrays_of(func) -> dict[str, np.ndarray]:
    """An array for each parameter of a kernel, of as many elements as its tensor."""
    rng = np.random.default_rng(0)
    sizes = {p.name: [int(n) for n in p.ty.shape] for p in func.params}
    kinds = {p.name: str(p.ty.dtype) for p in func.params}
    return {
        name: rng.standard_normal(int(np.prod(size))).astype(kinds[name])
        for name, size in sizes.items()
    }


#: Every block, fused and not; of these bert, fused, in every run.
CASES = [
    pytest.param(
        name,
        config,
        marks=() if (name, kind) == ("bert", "fused") else pytest.mark.slow,
        id=f"{name}-{kind}",
    )
    for name in BLOCKS
    for kind, config in (("fused", None), ("unfused", UNFUSED))
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_kernels_keep_to_their_arrays(name, dtype, config):
    target = parse_target("cuda:sm_90")
    kernels = EmulatedPlan(BLOCKS[name](dtype), target, config).kernels()
    assert kernels
    unused: set[tuple[str, str]] = set()
    for func_name, func in kernels.items():
        source = cuda_emulation.cuda_source(func, target)
        launch = cuda_emulation.launch_of(func)
        whole = arrays_of(func)
        results = {name: array.copy() for name, array in whole.items()}
        cuda_emulation.emulate(source, launch, results)
        for cut in whole:
            short = {k: (v[:-1] if k == cut else v).copy() for k, v in whole.items()}
            try:
                cuda_emulation.emulate(source, launch, short)
            except RuntimeError as error:
                assert re.search(rf"{cut} (read|written) out of range", str(error))
            else:
                unused.add((func_name, cut))
                del short[cut]
                for name, array in short.items():
                    np.testing.assert_array_equal(array, results[name])
    assert all("slice" in func_name for func_name, _ in unused), unused
