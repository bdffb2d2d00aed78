"""Options that commands share: those of a model, and which plan, records and inputs are used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .advice import warn_of_idle_patterns
from .output import stage

if TYPE_CHECKING:
    from ..compat import Target, tvm
    from ..config import FusionConfig
    from ..planner import Plan

#: Seed of random inputs; numpy takes none below zero.
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]

PlanOption = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="Take the decisions from this plan (JSON) instead of planning.",
    ),
]


WorkDirOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Use what tvm-fusion tune has kept there (default: the records that come with the "
        "package).",
    ),
]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model, for which target, fused how: the same for every command that takes a model."""

    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model file: .onnx, .pt2, or .json (saved Relax or Relay).",
        ),
    ]
    target: Annotated[
        str,
        typer.Option(
            help="llvm, cuda (this machine's GPU), cuda:sm_90a or another arch, or a TVM target "
            "as tag or JSON."
        ),
    ] = "llvm"
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, of vertical, horizontal, cross and compound (default: all).",
        ),
    ] = None
    preset: Annotated[
        Literal["auto", "small-cnn", "large-cnn", "transformer"] | None,
        typer.Option(help="Model family (default: auto, by the model's operators)."),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Convert the model (default: as it is)."),
    ] = None
    float32_products: Annotated[
        Literal["float32", "tf32"] | None,
        typer.Option(
            help="What float32 convolutions and matrix products are computed in: float32, or TF32 "
            "on tensor cores from sm_80 on, faster and with 10 bits of mantissa (default: float32)."
        ),
    ] = None
    numerics: Annotated[
        Literal["wide", "strict"] | None,
        typer.Option(
            help="Whether 16-bit values between the operators of a kernel may keep float32's "
            "precision, or are rounded as the model says (default: wide)."
        ),
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,N,...", help="Fix the shape of an input; repeat for more inputs."
        ),
    ] = None
    params: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Weights of a .json model, as relay.save_param_dict wrote them."
        ),
    ] = None
    deny: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Never fuse operators whose type or node name matches, as 'softmax' or "
            "'conv_1*'; repeat for more.",
        ),
    ] = None
    max_members: Annotated[
        int | None, typer.Option(help="Most branches in a horizontal group.")
    ] = None
    max_depth: Annotated[
        int | None, typer.Option(help="Most operators on a path of a vertical group.")
    ] = None
    max_operators: Annotated[int | None, typer.Option(help="Most operators in a group.")] = None
    balance: Annotated[
        Literal["refuse", "pad", "warps"] | None,
        typer.Option(
            help="What to do with branches of a join whose work is too unequal: leave them apart, "
            "zero-pad the lighter kernel, or let every warp work on each (default: refuse)."
        ),
    ] = None
    max_work_ratio: Annotated[
        float | None, typer.Option(help="Largest ratio of the work of two branches of a join.")
    ] = None
    max_recompute: Annotated[
        float | None, typer.Option(help="How often a value may be computed in a group, on average.")
    ] = None
    max_shared_memory: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES", help="Most shared memory of a block (default: the target's)."
        ),
    ] = None
    max_registers: Annotated[
        int | None, typer.Option(help="Most registers of a thread (default: the target's).")
    ] = None
    min_occupancy: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Least share of a multiprocessor's threads that can be resident."
        ),
    ] = None
    max_build_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Longest predicted time for compiling one kernel."),
    ] = None

    def parsed_target(self) -> Target:
        """Return the TVM target; an unknown one is a ``TargetError``."""
        from ..targets import parse_target

        return parse_target(self.target)

    def given(self) -> dict[str, Any]:
        """The options of planning that the user gave."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names if name not in _OF_THE_MODEL}
        return {name: value for name, value in values.items() if value is not None}

    def config(self) -> FusionConfig:
        """Return the configuration with what was given and defaults for the rest.

        Raises
        ------
        ValueError
            If a value is out of range; the message names its option.
        """
        from ..config import FusionConfig

        given = self.given()
        for name, value in given.items():
            try:
                FusionConfig(**{name: value})
            except ValueError as error:
                text = str(error).removeprefix(f"{name} ")
                same = text != str(error)
                raise ValueError(f"{option(name)}{' ' if same else ': '}{text}") from error
        return FusionConfig(**given)

    def load(self) -> tvm.IRModule:
        """Import the model."""
        from ..frontend import load

        with stage(f"importing {self.model.name}"):
            module = load(
                self.model,
                shape=parse_shapes(self.shape or []),
                dtype=self.dtype,
                params=self.params,
            )
        if self.deny:
            warn_of_idle_patterns(self.deny, module)
        return module

    @property
    def name(self) -> str:
        """Name of the model in plans: the file's name without its suffix."""
        return self.model.stem


#: Fields of ``ModelOptions`` that are no fields of ``FusionConfig``.
_OF_THE_MODEL = ("model", "target", "dtype", "shape", "params")


def option(name: str) -> str:
    """Option of a field, as ``--max-depth``."""
    return f"--{name.replace('_', '-')}"


def parse_shapes(texts: list[str]) -> dict[str, tuple[int, ...]] | None:
    """Parse ``NAME=1,3,224,224`` texts; ``None`` if there are none.

    Raises
    ------
    ValueError
        If a text has another form, a dimension is not positive, or a name comes twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        # A name may itself hold "=", a shape may not.
        name, _, numbers = text.rpartition("=")
        dims = [part.strip() for part in numbers.split(",")]
        if not name or not all(dim.isdecimal() and int(dim) > 0 for dim in dims):
            raise ValueError(f"--shape {text!r} is not of the form NAME=1,3,224,224")
        if name in shapes:
            raise ValueError(f"--shape gives {name!r} twice")
        shapes[name] = tuple(map(int, dims))
    return shapes or None


def decisions(options: ModelOptions, file: Path | None) -> Plan | None:
    """Read the plan that the user gave, if any.

    Raises
    ------
    ValueError
        If options of planning are given beside it.
    PlanError
        If the file holds no plan.
    """
    if file is None:
        return None
    given = [option(name) for name in options.given()]
    if given:
        raise ValueError(f"--plan holds the decisions already; leave out {' and '.join(given)}")
    from ..errors import PlanError
    from ..planner import Plan

    try:
        return Plan.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(
            f"--plan {file} does not exist; write it with tvm-fusion plan -o {file.name}"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"--plan {file} is not text; write it with tvm-fusion plan --format json"
        ) from error
    except PlanError as error:
        raise PlanError(f"--plan {file}: {error}") from error
