"""CUDA templates, registered in the order in which they are tried.

Templates that know a form well come before those that take it too: a tensor-core product belongs before ``matmul``.
"""

from ..registry import register
from .conv2d import Conv2d
from .elementwise import Elementwise
from .fallback import Fallback
from .matmul import Matmul, MatrixVector
from .partitioned import Partitioned
from .pooling import Pooling
from .rows import RowReduction

#: Order matters: ``Partitioned`` splits off independent members before anything looks at them together;
#: ``MatrixVector`` takes few rows from ``Matmul``; ``Fallback`` takes what is left.
TEMPLATES = tuple(
    register(template())
    for template in (
        Partitioned,
        Elementwise,
        Conv2d,
        MatrixVector,
        Matmul,
        Pooling,
        RowReduction,
        Fallback,
    )
)
