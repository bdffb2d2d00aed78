"""CUDA templates, registered in the order in which they are tried.

Templates that know a form well come before those that take it too: a tensor-core product belongs before ``matmul``.
"""

from ..registry import register
from .anchor_rows import AnchorRows
from .attention.template import AttentionTemplate
from .back_to_back import BackToBack
from .conv2d import Conv2d
from .elementwise import Elementwise
from .fallback import Fallback
from .gated import Gated
from .matmul import Matmul, MatrixVector
from .partitioned import Partitioned
from .pooling import Pooling
from .rows import RowReduction
from .simt.template import MultiplyAdd
from .strips.template import StripConvolution
from .tensor_core.row_template import TensorRows
from .tensor_core.template import TensorCore

#: Order matters: ``Partitioned`` splits off independent members before anything looks at them together;
#: ``Gated`` takes products that only scale a larger tensor before the templates that would tile them;
#: ``AttentionTemplate`` takes two products around a softmax, which no other template has;
#: ``StripConvolution`` takes depthwise convolutions, and groups that are no faster as products; ``TensorRows``
#: and ``TensorCore`` take 16-bit products, and ``MultiplyAdd`` those of float32, on chips with asynchronous copies;
#: ``MatrixVector`` takes few rows from ``Matmul``; two dependent sums go to ``BackToBack``, a product with reductions
#: of its rows to ``AnchorRows``; ``Fallback`` takes what is left.
TEMPLATES = tuple(
    register(template())
    for template in (
        Partitioned,
        Elementwise,
        Gated,
        StripConvolution,
        AttentionTemplate,
        TensorRows,
        TensorCore,
        MultiplyAdd,
        Conv2d,
        MatrixVector,
        Matmul,
        BackToBack,
        AnchorRows,
        Pooling,
        RowReduction,
        Fallback,
    )
)
