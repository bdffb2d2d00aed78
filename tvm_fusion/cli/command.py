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

if TYPE_CHECKING:
    from ..compat import Target, tvm
    from ..config import FusionConfig
    from ..planner import Plan

PlanOption = Annotated[
    Path | None,
    typer.Option(help="Take the decisions from this plan (JSON) instead of planning."),
]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model, for which target, fused how: the same for every command that takes a model."""

    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model file: .onnx, .pt2, or Relax .json.")
    ]
    target: Annotated[
        str,
        typer.Option(
            help="llvm, cuda (this machine's GPU), cuda:sm_90a or another arch, or a TVM target "
            "as tag or JSON."
        ),
    ] = "llvm"
    strategies: Annotated[
        str | None, typer.Option(help="Comma-separated: vertical,horizontal (default: all).")
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Convert the model (default: as it is)."),
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,N,...", help="Fix the shape of an input; repeat for more inputs."
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

    def parsed_target(self) -> Target:
        """Return the TVM target; an unknown one is a ``TargetError``."""
        from ..targets import parse_target

        return parse_target(self.target)

    def config(self) -> FusionConfig:
        """Return the configuration with what was given and defaults for the rest."""
        from ..config import FusionConfig

        given = {
            "strategies": self.strategies,
            "deny": tuple(self.deny) if self.deny else None,
            "max_members": self.max_members,
            "max_depth": self.max_depth,
        }
        return FusionConfig(**{name: value for name, value in given.items() if value is not None})

    def load(self) -> tvm.IRModule:
        """Import the model."""
        from ..frontend import load

        with stage(f"importing {self.model.name}"):
            return load(self.model, shape=parse_shapes(self.shape or []), dtype=self.dtype)

    @property
    def name(self) -> str:
        """Name of the model in plans: the file's name without its suffix."""
        return self.model.stem


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
    if any((options.strategies, options.deny, options.max_members, options.max_depth)):
        raise ValueError(
            "--plan holds the decisions already; leave out --strategies, --deny, --max-members "
            "and --max-depth"
        )
    from ..planner import Plan

    return Plan.from_json(file.read_text(encoding="utf-8"))


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
    def command(*, debug: bool, **values: Any) -> int | None:
        return function(**_collected(signature, values))

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


def check_output(output: Path, model: Path) -> None:
    """Refuse an output that cannot be a new file, before any work is done."""
    folder = output.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name the file to write")
    if output.exists() and model.exists() and output.samefile(model):
        raise ValueError(f"{output} is the model itself; name another file with -o")
