"""Import of Relax modules, from memory or from the JSON that TVM saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..compat import relax, tirx, tvm
from ..errors import InvalidModelError
from . import child
from .canonical import canonicalize

#: Time limit of the trial reading of a JSON module.
READ_SECONDS = 300


def from_relax(
    mod: tvm.IRModule,
    dtype: str | None = None,
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    params: Mapping[str, object] | Sequence[object] | None = None,
) -> tvm.IRModule:
    """Bring a Relax module into the canonical form; the given module is not changed.

    Parameters
    ----------
    mod : IRModule
        A module of Relax operators with a function ``main``, before LegalizeOps.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Convert the model to this dtype; see ``canonicalize``.
    shape : mapping of input name to sizes, optional
        Sizes of inputs with symbolic dimensions.
    params : mapping or sequence of arrays, optional
        Values of the parameters after the first ``num_input``.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError, ValueError
        See ``load``.
    """
    if shape:
        mod = bind_dimensions(mod, shape)
    return canonicalize(mod, dtype, params=params)


def from_json(
    data: bytes,
    name: str,
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    params: Mapping[str, object] | None = None,
) -> tvm.IRModule:
    """Import a Relax module that ``tvm.ir.save_json`` made JSON text of, called ``name`` in messages.

    TVM's reader trusts its input: a damaged file crashes the process. So a child process reads the
    text first, which takes about 2 s.
    """
    try:
        child.run(f"{__package__}.relax_worker", {}, data, step="TVM", seconds=READ_SECONDS)
    except child.ChildFailure as error:
        reason = str(error).splitlines()[0]
        raise InvalidModelError(
            f"{name!r} does not hold a Relax module saved by tvm.ir.save_json: {reason}"
        ) from None
    return from_relax(read_json(data.decode()), dtype, shape=shape, params=params)


def read_json(text: str) -> tvm.IRModule:
    """Return the module in ``text``; only for text that a child process has read before."""
    mod = tvm.ir.load_json(text)
    if not isinstance(mod, tvm.IRModule):
        raise InvalidModelError(f"it holds a {type(mod).__name__}")
    return mod


def bind_dimensions(mod: tvm.IRModule, shape: Mapping[str, Sequence[int]]) -> tvm.IRModule:
    """Return ``mod`` with the symbolic dimensions of ``main``'s inputs fixed to ``shape``.

    Raises
    ------
    ValueError
        If ``shape`` names an unknown input, has another rank or contradicts a static dimension.
    """
    if "main" not in [gvar.name_hint for gvar in mod.get_global_vars()]:
        return mod  # canonicalize says so
    main = mod["main"]
    count = (
        len(main.params)
        if main.attrs is None
        else int(main.attrs.get("num_input", len(main.params)))
    )
    inputs = {param.name: param for param in main.params[:count]}
    listing = "; the model's inputs are " + ", ".join(
        f"{name}={_describe(p)}" for name, p in inputs.items()
    )
    values: dict[object, int] = {}
    for name, given in shape.items():
        if name not in inputs:
            raise ValueError(f"the model has no input {name!r}{listing}")
        known = getattr(inputs[name].ty, "shape", None)
        if not isinstance(known, relax.ShapeExpr) or len(known.values) != len(given):
            raise ValueError(f"input {name!r} does not have {len(given)} dimensions{listing}")
        for dim, size in zip(known.values, given, strict=True):
            if not isinstance(dim, tirx.IntImm):
                if not isinstance(dim, tirx.Var):
                    continue  # an expression of other dimensions
                if values.setdefault(dim, int(size)) != size:
                    raise ValueError(
                        f"dimension {dim.name!r} is given both {values[dim]} and {size}{listing}"
                    )
            elif int(dim) != size:
                raise ValueError(
                    f"input {name!r} has a static shape that {tuple(given)} contradicts{listing}"
                )
    return relax.transform.BindSymbolicVars(values, "main")(mod) if values else mod


def _describe(param: relax.Var) -> str:
    shape = getattr(param.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return "unknown"
    return ",".join(
        str(int(dim)) if isinstance(dim, tirx.IntImm) else str(dim) for dim in shape.values
    )
