"""No kernel of a plan touches memory beyond its arrays, which in the emulation are as large as their tensors.

On a GPU most such accesses go unseen: TVM's pool puts tensors side by side in larger allocations, so that even
compute-sanitizer has nothing to report. Here each kernel runs on arrays of the exact sizes, then once per array with
its last element cut off. That has to be found, which shows that the ends of all arrays are watched, vector and
asynchronous loads included.
"""

from __future__ import annotations

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


def cases():
    """Every block, fused and not; bert fused is fast enough for every run."""
    for name in BLOCKS:
        for kind, config in (("fused", None), ("unfused", UNFUSED)):
            marks = () if (name, kind) == ("bert", "fused") else pytest.mark.slow
            yield pytest.param(name, config, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "config"), cases())
def test_kernels_keep_to_their_arrays(name, dtype, config):
    target = parse_target("cuda:sm_90")
    kernels = EmulatedPlan(BLOCKS[name](dtype), target, config).kernels()
    assert kernels
    for func in kernels.values():
        source = cuda_emulation.cuda_source(func, target)
        launch = cuda_emulation.launch_of(func)
        whole = arrays_of(func)
        cuda_emulation.emulate(source, launch, dict(whole))
        for cut in whole:
            short = {k: v[:-1].copy() if k == cut else v for k, v in whole.items()}
            with pytest.raises(RuntimeError, match=rf"{cut} (read|written) out of range"):
                cuda_emulation.emulate(source, launch, short)
