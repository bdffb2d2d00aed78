"""Average pooling by a divisor of one's own, which TVM 0.27 ignores; maximum pooling whose indices are not used."""

from __future__ import annotations

import math

from torch import fx

from ..compat import ir, relax
from .torch_arguments import Arguments, Converter, Importer, static_dims

_POOLS = {2: relax.op.nn.avg_pool2d, 3: relax.op.nn.avg_pool3d}


def _by_divisor(name: str, ndim: int) -> Converter:
    """Sums of windows divided by ``divisor_override``; TVM's own converter where there is none."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        arguments = Arguments(importer.env, node)
        divisor = arguments["divisor_override"]
        if divisor is None:
            return importer.stock[name](node)
        builder, fake = importer.block_builder, arguments.fake("self")
        window, padding = (_each(arguments[key], ndim) for key in ("kernel_size", "padding"))
        stride = _each(arguments["stride"] or window, ndim)
        before, after = static_dims(fake)[-ndim:], static_dims(node.meta["val"])[-ndim:]
        # Zeros up to the end of the last window, so that every window is whole and its mean times its size its sum.
        width = [0, 0] * (fake.ndim - ndim)
        for size, count, k, step, pad in zip(before, after, window, stride, padding, strict=True):
            width += [pad, max((count - 1) * step + k - size - pad, 0)]
        value = arguments["self"]
        if any(width):
            value = builder.emit(relax.op.nn.pad(value, width, "constant", 0.0))
        if fake.ndim == ndim + 1:
            value = builder.emit(relax.op.expand_dims(value, [0]))
        value = builder.emit(_POOLS[ndim](value, window, stride))
        if fake.ndim == ndim + 1:
            value = builder.emit(relax.op.squeeze(value, [0]))
        factor = relax.const(math.prod(window) / divisor, str(value.ty.dtype))
        return builder.emit(relax.op.multiply(value, factor))

    return convert


def _without_places(name: str) -> Converter:
    """TVM's own converter of a maximum pooling, whose second result it does not compute."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        if any(user.args[1:] == (1,) and user.users for user in node.users):
            raise NotImplementedError("its indices are used")
        return importer.stock[name](node)

    return convert


def _each(value: int | list[int], ndim: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * ndim if len(values) == 1 else values


#: Converters by the name of the ATen overload.
POOLS: dict[str, Converter] = {
    **{
        f"avg_pool{ndim}d.default": _by_divisor(f"avg_pool{ndim}d.default", ndim) for ndim in _POOLS
    },
    **{
        f"max_pool{ndim}d_with_indices.default": _without_places(
            f"max_pool{ndim}d_with_indices.default"
        )
        for ndim in (2, 3)
    },
}
