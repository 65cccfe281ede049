"""Groups of verbs, to which installed plug-ins add by entry points of `dpfy.commands`."""

from __future__ import annotations

import inspect
import re
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from dpfy.core import errors, plugins

LAB = ("reproduce", "audit.selftest", "plan.textbook", "synthesize.images")
"""The verbs of the distribution dpfy-lab. Where it is not installed, they say so."""
PANEL = "Commands of plug-ins"
EXAMPLE = "Example: "
"""How the last paragraph of a help text begins."""


def unwrapped(command: Any) -> Any:
    """The command, and those below it, with each paragraph of their help in one line, and the
    example at the end.

    Docstrings are wrapped for readers of the code; the terminal has a width of its own, and Rich
    keeps the line breaks of all paragraphs but the first.
    """
    if command.help:
        paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help))
        whole = [" ".join(paragraph.split()) for paragraph in paragraphs]
        if whole[-1].startswith(EXAMPLE):
            command.epilog = whole.pop()
        command.help = "\n\n".join(whole)
    for below in getattr(command, "commands", {}).values():
        unwrapped(below)
    return command


class PluginCommand(TyperCommand):
    """A verb of a plug-in. The plug-in is imported when the verb is called, and not to list it."""

    def __init__(self, path: str, distribution: str) -> None:
        super().__init__(
            path.rpartition(".")[2],
            help=f"From {distribution}.",
            rich_help_panel=PANEL,
            rich_markup_mode="rich",
        )
        self.path = path

    def command(self) -> Any:
        """The verb itself, as the plug-in defines it."""
        found = plugins.find(plugins.COMMANDS, self.path)
        if found is None:
            raise errors.missing(f"dpfy {self.path.replace('.', ' ')}", "dpfy_lab")
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode="rich")
            single.command(self.name)(found)
            found = single
        return unwrapped(typer.main.get_command(found))

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """That of the verb itself."""
        return self.command().make_context(info_name, args, parent, **extra)


class VerbGroup(TyperGroup):
    """A group of verbs that plug-ins can add to; a verb of dpfy itself is never replaced."""

    default: ClassVar[str] = ""
    """The verb that is meant where the first word is no verb; empty: that is an error."""
    default_alone: ClassVar[bool] = False
    """Whether the default is meant too where there is no word at all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the default verb where it was left out."""
        if self.default and (args or self.default_alone):
            named = args and (args[0] == "--help" or self.get_command(ctx, args[0]) is not None)
            args = args if named else [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs of dpfy, then those of plug-ins."""
        own, prefix = super().list_commands(ctx), self._path("")
        added = [
            path.removeprefix(prefix)
            for path in plugins.installed(plugins.COMMANDS)
            if path.startswith(prefix) and "." not in path.removeprefix(prefix)
        ]
        return own + [name for name in added if name not in own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb `cmd_name`; None where there is none."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        path = self._path(cmd_name)
        distribution = plugins.installed(plugins.COMMANDS).get(path)
        if distribution is None and path not in LAB:
            return None
        return PluginCommand(path, distribution or "dpfy-lab")

    def _path(self, name: str) -> str:
        return name if self.name == "dpfy" else f"{self.name}.{name}"


def group(
    words: str, *, short: str | None = None, default: str = "", name: str | None = None
) -> Any:
    """A group of verbs, which plug-ins can add to.

    Args:
        words: Its help.
        short: Its line in the list of commands, where that is not its help.
        default: The verb that is meant where the first word is none of its verbs.
        name: What it is called, where no other group says so.
    """
    kind = type("Verbs", (VerbGroup,), {"default": default})
    return typer.Typer(
        name=name,
        cls=kind,
        short_help=short,
        help=words,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
