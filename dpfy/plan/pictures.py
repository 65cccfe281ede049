"""Pictures of correlated noise: the matrix C, its inverse, and how noise accumulates with and
without correlation.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfy.plan.auto import MechanismCandidate

MOST_STEPS = 512
"""Matrices are drawn up to this size; a longer run is drawn by its first steps."""


def draw(found: tuple[MechanismCandidate, ...], form: str = "svg") -> bytes:
    """A picture (svg or png) of the best correlated candidate's C and C^-1, and of how the noise of
    all candidates accumulates.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    best = next((c for c in found if c.buffers), found[0])
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8.5), layout="constrained")
    encoder, noise = _matrices(best)
    for place, matrix, title in ((axes[0, 0], encoder, "C"), (axes[0, 1], noise, "inverse of C")):
        _structure(place, matrix, f"{title}: {best.mechanism}, {best.sampling}")
    _entries(axes[1, 0], noise)
    _accumulation(axes[1, 1], found)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form)
    pyplot.close(figure)
    return drawn.getvalue()


def _matrices(candidate: MechanismCandidate) -> tuple[Any, Any]:
    from dpfy.noise.workload import measured

    recipe = candidate.plan.recipe
    known: Any = measured(recipe.strategy)
    encoder, noise = known.encoder(recipe.steps), known.noise_matrix(recipe.steps)
    return encoder[:MOST_STEPS, :MOST_STEPS], noise[:MOST_STEPS, :MOST_STEPS]


def _structure(axes: Any, matrix: Any, title: str) -> None:
    import numpy as np
    from matplotlib import colors

    limit = float(np.abs(matrix).max())
    norm = colors.SymLogNorm(linthresh=limit * 1e-2, vmin=-limit, vmax=limit)
    image = axes.imshow(matrix, cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set_title(title)
    axes.set_xlabel("step of the draw")
    axes.set_ylabel("step")


def _entries(axes: Any, noise: Any) -> None:
    values = noise[noise != 0]
    axes.hist(values, bins=80, log=True)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_title("entries of the inverse: negative ones cancel noise")
    axes.set_xlabel("entry")
    axes.set_ylabel("count")


def _accumulation(axes: Any, found: tuple[MechanismCandidate, ...]) -> None:
    import numpy as np

    from dpfy.noise.workload import variances

    for candidate in found:
        recipe = candidate.plan.recipe
        sensitivity = recipe.strategy.sensitivity(recipe.sampler.participation, recipe.steps)
        scale = candidate.plan.noise_multiplier * sensitivity / recipe.expected_batch
        path = scale * np.sqrt(variances(recipe.strategy, recipe.steps))
        axes.plot(
            np.arange(1, recipe.steps + 1),
            path,
            label=f"{candidate.mechanism}, {candidate.sampling}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title("noise in the sum of mean gradients so far")
    axes.set_ylabel("standard deviation at clip norm 1")
    axes.legend(
        fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
    )
