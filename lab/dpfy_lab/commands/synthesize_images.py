"""`dpfy synthesize images`: private synthetic images with labels."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli.form import lines as toml
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import Json, option
from dpfy.cli.output import tell
from dpfy.cli.synthesize import progress_bar


def images(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="The private images: an NPZ file, or mnist, fashion-mnist, embedded, digits.",
            show_default=False,
        ),
    ],
    epsilon: Annotated[float, option("What all images together may cost.")],
    out: Annotated[Path | None, option("Run folder (default: new, in runs/).")] = None,
    delta: Annotated[float, typer.Option(help="Delta.")] = 1e-5,
    size: Annotated[
        str | None, option("Size of an image, HEIGHTxWIDTH, 28x28 say (for a file).")
    ] = None,
    classes: Annotated[int | None, option("Number of classes (for a file).")] = None,
    images: Annotated[
        int | None, option("Images to make (default: as many as there seem to be).")
    ] = None,
    clusters: Annotated[
        int | None, option("Gaussians of a class (default: as many as the noise allows).")
    ] = None,
    frequencies: Annotated[int, typer.Option(help="Cosines along each side of an image.")] = 12,
    rounds: Annotated[int, typer.Option(help="Rounds of k-means.")] = 4,
    data_dir: Annotated[
        Path | None, option("Folder that holds mnist/ (default: the environment's DPFY_DATA).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out: give the same options again."),
    ] = False,
    ledger: Annotated[Path | None, option("Ledger of the data set, over all its releases.")] = None,
    insecure_seed: Annotated[
        int | None, option("Fix all randomness, for tests: protects nothing.", hidden=True)
    ] = None,
    as_json: Json = False,
) -> None:
    """Make synthetic images with labels, and leave a run folder that anyone can verify.

    dpfy synthesize images letters.npz --size 28x28 --classes 26 --epsilon 1 --out runs/letters

    The images are runs/letters/images.npz: arrays x (bytes) and y (labels). Moments of the private
    images are measured with noise in a public basis, class by class and cluster by cluster, and
    images are drawn from Gaussians that have them. Small grey images only.
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.folder import ended
    from dpfy.runs.mark import Mark
    from dpfy.runs.run import Run, fresh_path
    from dpfy_lab.synthetic_images.run import ImageOptions, ImageSettings, synthesize_images

    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    out = out or fresh_path()
    if resume and Mark.find(out) is None and not ended(out):
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )
    asked: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "size": size,
        "classes": classes,
        "images": images,
    }
    asked |= {"clusters": clusters, "frequencies": frequencies, "rounds": rounds}
    private = {
        "data_dir": None if data_dir is None else str(data_dir),
        "ledger": None if ledger is None else str(ledger),
    }
    place = Run(
        out,
        resume,
        ledger,
        seed=insecure_seed,
        config=(toml(asked), toml(asked | private | {"data": data})),
    )
    flags = {key: value for key, value in (asked | private).items() if value is not None}
    words = [
        str(word) for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)
    ]
    with (
        resumable(out, shlex.join(["dpfy", "synthesize", "images", data, *words])),
        progress_bar() as progress,
    ):
        made = synthesize_images(
            data,
            terms=ImageSettings(epsilon, delta),
            run=place,
            schema=_schema(size, classes),
            options=ImageOptions(images, clusters, frequencies, rounds),
            data_dir=data_dir,
            progress=progress,
        )
    tell(made.to_json(), _lines(made), as_json=as_json)


def _schema(size: str | None, classes: int | None) -> Any:
    """Size and classes together, or neither."""
    from dpfy.core.errors import InvalidInput
    from dpfy_lab.synthetic_images.source import ImageSchema

    if size is None and classes is None:
        return None
    if size is None or classes is None:
        raise InvalidInput(
            "--size" if size is None else "--classes",
            None,
            "goes with the other: --size 28x28 --classes 10",
        )
    sides = size.lower().split("x")
    if len(sides) != 2 or not all(
        side.isascii() and side.isdigit() and len(side) < 6 for side in sides
    ):
        raise InvalidInput("--size", size, "must be HEIGHTxWIDTH, 28x28 say")
    return ImageSchema(int(sides[0]), int(sides[1]), classes)


def _lines(made: Any) -> list[str]:
    found = made.facts
    return [
        f"{found['images']} images of {found['size'][0]} x {found['size'][1]} pixels in "
        f"{found['classes']} classes: {made.file}",
        f"drawn from {found['clusters_of_a_class']} Gaussians a class, along {found['axes']} axes; "
        f"some of them: {made.run / 'sheet.png'}",
        "",
        made.card["statement"],
        f"check it: dpfy verify {made.run}",
    ]
