"""Options of the command line from the fields of a configuration. Needs the package typer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gradguess_lab.config import TrainConfig

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Threads = Annotated[int, typer.Option(help="Threads of PyTorch; 0: its own default.")]


def with_config_options(command: Callable[..., None], config: Any = TrainConfig) -> Callable[..., None]:
    """Replace the parameter `config` by one option per field of the configuration: fields are declared once."""
    fields = {item.name: item for item in dataclasses.fields(config)}

    def wrapped(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in fields}
        command(config=config(**chosen), **values)

    parameters = [
        item for name, item in inspect.signature(command, eval_str=True).parameters.items() if name != "config"
    ]
    for name, item in fields.items():
        kind: Any = str if item.type == "int | str" else type(item.default)
        annotation = Annotated[kind, typer.Option(help=item.metadata["help"])]
        default = str(item.default) if kind is str else item.default
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    wrapped.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in keyword_only}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped
