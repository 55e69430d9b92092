"""Every command with every option, from the commands themselves: the rest of docs/api/command-line.md."""

from __future__ import annotations

from typing import Any


def commands() -> str:
    """A section for each command."""
    import typer

    from gradguess_lab.cli import app

    group: Any = typer.main.get_command(app)
    return "\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    arguments = [_names(one)[0] for one in command.params if one.param_type_name == "argument"]
    table = ["| option | default | |", "|---|---|---|", *(_row(one) for one in command.params if one.name != "help")]
    usage = " ".join([f"    gradguess {name}", *arguments, "[OPTIONS]"])
    return "\n".join([f"## gradguess {name}", "", command.help, "", usage, "", *table, ""])


def _row(param: Any) -> str:
    plain = param.default is None or param.default is False or param.default == ""
    default = "required" if param.required else "" if plain else f"`{param.default}`"
    cells = [" ".join(f"`{name}`" for name in _names(param)), default, param.help or ""]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else [param.name.upper()]
