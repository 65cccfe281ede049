"""`dpfy report derive`: add to a finished run what was made from its released files and public data
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli import options
from dpfy.cli.output import tell


def derive(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="What was made: a pruned, quantised, calibrated or distilled model, a table, a "
            "plot."
        ),
    ] = None,
    how: Annotated[
        str | None, typer.Option(help="How it was made, in one line.", show_default=False)
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option(help="Instead of FILE: this share of each matrix becomes zero."),
    ] = None,
    quantise: Annotated[
        bool, typer.Option("--quantise", help="Instead of FILE: round matrices to 8 bits.")
    ] = False,
    of: Annotated[
        list[str],
        typer.Option(help="The file of the run that it was made from; may be given several times."),
    ] = [  # noqa: B006
        "model.safetensors"
    ],
    public: Annotated[
        str, typer.Option(help="The public data that went into it, and where it is from.")
    ] = "none",
    name: Annotated[
        str | None, typer.Option(help="Its name in the folder; by default the file's own.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Add a derived file to a finished run: post-processing is covered by the guarantee and costs
    nothing.

    The ledger keeps its hash, what it was made of, how, and which public data was used; dpfy verify
    follows it. What dpfy cannot see is whether private data went into it after all: that would be a
    release of its own, and must be charged.

    Example: dpfy report derive runs/x small.bin --how "rounded to 8 bits"
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.runs import derive as derived

    if prune is not None or quantise:
        from dpfy.training import distill

        if file is not None or how is not None or (prune is not None and quantise):
            rule = "goes without FILE, --how and each other"
            raise InvalidInput("--prune, --quantise", "more than one", rule)
        named = {} if name is None else {"name": name}
        made = (
            distill.quantise(run, **named) if prune is None else distill.prune(run, prune, **named)
        )
        words = [f"added: {made}", f"check it: dpfy verify {run}"]
        tell({"run": str(run), "file": made.name}, words, as_json=as_json)
        return
    if file is None or how is None:
        raise InvalidInput("FILE, --how", (file, how), "must both be given")
    place = derived.derive(run, file, of=of, how=how, public=public, name=name)
    facts = {"run": str(run), "file": place.name, "of": of, "how": how, "public": public}
    tell(facts, [f"added: {place}", f"check it: dpfy verify {run}"], as_json=as_json)
