"""How a function becomes a command: its options from its parameters, its help and examples from its docstring."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import ModelOptions


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
