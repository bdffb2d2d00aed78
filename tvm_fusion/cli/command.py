"""What the commands share: options of a model, registration with examples, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .advice import warn_of_idle_patterns

if TYPE_CHECKING:
    from ..compat import Target, tvm
    from ..config import FusionConfig
    from ..planner import Plan

#: Columns of the tables in a file or a pipe.
PIPE_WIDTH = 160

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


class ExitCode(int):
    """What a command returned; other exit codes are typer's own."""


def register(app: typer.Typer, function: Callable[..., int | None]) -> None:
    """Add a function as a command.

    Its name is that of the function up to the first underscore, its help the first paragraph of the
    docstring, its examples the lines below ``Examples``. A parameter of type ``ModelOptions``
    stands for one option per field. ``--debug`` is added; the program reads it.
    """
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n\n")
    examples = [line.strip() for line in rest.splitlines() if line.strip().startswith("tvm-fusion")]
    parameters: list[inspect.Parameter] = []
    signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        parameters += _expanded(parameter)
    parameters.append(
        inspect.Parameter(
            "debug",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")],
        )
    )

    @functools.wraps(function)
    def command(*, debug: bool, **values: Any) -> ExitCode:
        try:
            return ExitCode(function(**_collected(signature, values)) or 0)
        except KeyboardInterrupt:
            # Of the exception itself typer makes an exit without a word.
            raise typer.Abort from None

    command.__signature__ = signature.replace(parameters=parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # Blank lines between them, since typer joins the lines of a paragraph.
    epilog = "\n\n".join(["Examples:", *examples])
    app.command(function.__name__.partition("_")[0], help=summary, epilog=epilog)(command)


def _expanded(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Turn a ``ModelOptions`` parameter into one per field."""
    if parameter.annotation is not ModelOptions:
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    return [
        field.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for field in inspect.signature(ModelOptions, eval_str=True).parameters.values()
    ]


def _collected(signature: inspect.Signature, values: dict[str, Any]) -> dict[str, Any]:
    """Put the values of the fields back into a ``ModelOptions``."""
    fields = {field.name for field in dataclasses.fields(ModelOptions)}
    arguments = {name: value for name, value in values.items() if name in signature.parameters}
    for parameter in signature.parameters.values():
        if parameter.annotation is ModelOptions:
            arguments[parameter.name] = ModelOptions(
                **{name: value for name, value in values.items() if name in fields}
            )
    return arguments


@contextlib.contextmanager
def stage(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show that a step is running, on stderr and only on a terminal.

    Parameters
    ----------
    text : str
        What is being done.

    Yields
    ------
    callable
        ``progress(done, total)``, to be called by steps that know how far they are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        task = display.add_task(text, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


def write_text(file: Path, text: str) -> None:
    """Write a text file; an error names it (that of a full disk would not)."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def check_output(output: Path, model: Path) -> None:
    """Refuse an output that cannot be a new file, or would be one of tuning's, before any work is done."""
    from ..tuning.work_dir import folder_of_records

    folder = output.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name the file to write")
    if output.exists() and model.exists() and output.samefile(model):
        raise ValueError(f"{output} is the model itself; name another file with -o")
    records = folder_of_records(output)
    if records is not None:
        raise ValueError(f"{output} is among the records in {records}; name a file elsewhere")
