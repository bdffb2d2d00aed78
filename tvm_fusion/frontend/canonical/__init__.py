"""The clean-up passes that bring every imported module to one canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...compat import structural_hash, tvm
from ...errors import InvalidModelError, UnsupportedOperatorError
from .bind_weights import BindWeights
from .compact_constants import CompactConstants
from .convert_dtype import ConvertDtype
from .convert_layout import ConvertLayout
from .copy_outputs import CopyOutputs
from .decompose_batch_norm import DecomposeBatchNorm
from .drop_infinite_selections import DropInfiniteSelections
from .expand_einsum import ExpandEinsum
from .expand_powers import ExpandPowers
from .flatten_bindings import FlattenBindings
from .fold_constants import FoldConstants
from .fold_padding import FoldPadding
from .fold_scale_into_weights import FoldScaleIntoWeights
from .huge_tensors import refuse_huge_tensors
from .merge_scale_shifts import MergeScaleShifts
from .move_reshapes import MoveReshapes
from .recognize_norms import RecognizeNorms
from .recognize_softmax import RecognizeSoftmax
from .remove_no_ops import RemoveNoOps
from .replace_reshapes import ReplaceReshapes
from .rewrite import bindings_of, sharing_scans
from .simplify_bias import SimplifyBias
from .slice_lookups import SliceLookups
from .slice_splits import SliceSplits
from .split_products import SplitProducts
from .unstack_reductions import UnstackReductions
from .widen_orders import WidenOrders
from .widen_sums import WidenSums

__all__ = [
    "CANONICAL_PASSES",
    "BindWeights",
    "CompactConstants",
    "ConvertDtype",
    "ConvertLayout",
    "CopyOutputs",
    "DecomposeBatchNorm",
    "DropInfiniteSelections",
    "ExpandEinsum",
    "ExpandPowers",
    "FlattenBindings",
    "FoldConstants",
    "FoldPadding",
    "FoldScaleIntoWeights",
    "MergeScaleShifts",
    "MoveReshapes",
    "RecognizeNorms",
    "RecognizeSoftmax",
    "RemoveNoOps",
    "ReplaceReshapes",
    "SimplifyBias",
    "SliceLookups",
    "SliceSplits",
    "SplitProducts",
    "UnstackReductions",
    "WidenOrders",
    "WidenSums",
    "canonicalize",
]

#: The dtypes that a model can be converted to.
DTYPES: tuple[str, ...] = ("float32", "float16", "bfloat16")

#: The passes in order. Each leaves a legal module, so a user may stop after any of them.
CANONICAL_PASSES: tuple[type, ...] = (
    FlattenBindings,  # first: the others expect one function, one dataflow block, one operator a binding
    BindWeights,  # before folding: a weight must be a constant to be folded into
    ReplaceReshapes,  # before RemoveNoOps and FoldConstants, which then know one operator instead of four
    UnstackReductions,  # before FoldConstants, which would materialise stacked constants
    ExpandEinsum,  # before FoldConstants, which moves the axes of weights
    FoldConstants,  # weights become single constants here: the next passes look no further than their operands
    SliceLookups,  # after folding, which finds out what an index is
    CompactConstants,  # after folding, for the full-size constants that the file itself stores
    ExpandPowers,  # after CompactConstants: it looks for one number
    DecomposeBatchNorm,  # needs constant statistics
    RemoveNoOps,  # before merging: a dropout between two constants' operators would split the chain
    RecognizeNorms,  # after ExpandPowers: it looks for squares
    RecognizeSoftmax,  # after RemoveNoOps: a conversion to the same type would split the chain
    DropInfiniteSelections,  # after RecognizeSoftmax, of whose results none is infinite
    MoveReshapes,  # after RemoveNoOps: a dropout would stop a reshape on its way
    SplitProducts,  # after MoveReshapes, which brings the split and its product together
    SliceSplits,  # after SplitProducts, which leaves no copy at all
    FoldPadding,  # any time after RemoveNoOps, which drops paddings by nothing
    MergeScaleShifts,  # one multiplication and one addition per chain, so that the next pass sees the whole scale
    FoldScaleIntoWeights,  # leaves convolution + addition where batch norm was
    SimplifyBias,  # last: it only settles the form of the additions that remain
)


def canonicalize(
    mod: tvm.IRModule,
    dtype: str | None = None,
    *,
    params: Mapping[str, object] | Sequence[object] | None = None,
    channels_last: bool = False,
) -> tvm.IRModule:
    """Return ``mod`` in the canonical form; the input module is not changed.

    Parameters
    ----------
    mod : IRModule
        A Relax module with a function ``main`` of operators (not yet legalized).
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert parameters, constants and operators to this dtype. The 16-bit ones also change
        convolutions and what surrounds them to NHWC.
    params : mapping or sequence of arrays, optional
        Values of the parameters after the first ``num_input``.
    channels_last : bool
        Change convolutions and what surrounds them to NHWC whatever the dtype.

    Raises
    ------
    InvalidModelError
        If there is no ``main``, or a folded constant is over the size limit.
    UnsupportedOperatorError
        If the module holds control flow, functions that cannot be inlined, or lowered calls.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    unchanged = dtype is None and params is None
    if unchanged and isinstance(mod, tvm.IRModule) and _is_known(mod):
        if not channels_last:
            return mod
        makers: tuple[type, ...] = ()
    else:
        makers = CANONICAL_PASSES
    passes = [BindWeights(params) if make is BindWeights else make() for make in makers]
    if dtype is not None:
        # After all folding, which so happens in the model's own precision.
        passes += [ConvertDtype(dtype), RemoveNoOps()]
    if makers:
        # After the conversion, which takes casts away.
        passes += [WidenSums(), WidenOrders()]
    if dtype in ("float16", "bfloat16") or channels_last:
        # Last: it knows the canonical operators only. Transposes that meet are removed once more.
        passes += [ConvertLayout(), RemoveNoOps()]
    # After the last RemoveNoOps, which would take the copies away.
    passes.append(CopyOutputs())
    with sharing_scans():
        for transform in passes:
            try:
                mod = transform(mod)
            except TypeError as error:
                if not isinstance(transform, ConvertDtype):
                    raise
                reason = str(error).strip().splitlines()[-1]
                raise UnsupportedOperatorError(
                    f"the model cannot be converted to {dtype}: {reason}"
                ) from error
    if not bindings_of(mod["main"]):
        raise InvalidModelError("the model computes nothing: every output is a constant")
    refuse_huge_tensors(mod)
    _CANONICAL[_digest(mod)] = None
    while len(_CANONICAL) > _REMEMBERED:
        del _CANONICAL[next(iter(_CANONICAL))]
    return mod


#: Digests of recent results, oldest first: planning, compiling and verifying one model would clean
#: it up each time, which takes longer than planning it.
_CANONICAL: dict[int, None] = {}
_REMEMBERED = 256


def _digest(mod: tvm.IRModule) -> int:
    """Hash of a module's structure without its weights, which would take longer to hash.

    Of two modules of one structure the second may hold a multiplication by ones that the first
    does not; it then stays, which is right and only slower.
    """
    return structural_hash(mod, skip_tensor_content=True)


def _is_known(mod: tvm.IRModule) -> bool:
    return _digest(mod) in _CANONICAL
