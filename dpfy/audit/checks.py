"""The checks of the self-test: the white-box audit, and deterministic or distributional checks of
one promise each.

A check returns None, or one line that says which promise is broken. Statistical ones have a
false-alarm rate below 1e-5 each (the audits: 1%); seeds are fixed, so a pass is a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dpfy.audit import (
    answers,
    clients,
    evolutions,
    labels,
    learners,
    owners,
    people,
    pictures,
    searches,
    sums,
    tables,
    whitebox,
)
from dpfy.audit.bench import Bench, Bug
from dpfy.audit.families import ClaimedFamily
from dpfy.core.errors import DpfyError
from dpfy.core.unit import Adjacency

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LENGTH = 10.0
SIGMAS = 5.0
RUNS = (0, 1)


def dimension(bench: Bench) -> int:
    """Length of the flat parameter vector."""
    return max(place.stop for place in bench.parameters.values())


def white_box(bench: Bench, bug: Bug) -> str | None:
    """One Dirac canary for each parameter of the model, in by a fair coin, in two runs; likelihood
    ratio and spread, by layer too.
    """
    return _audited(bench, bug, Adjacency.ADD_OR_REMOVE_ONE, 0.0)


def replaced(bench: Bench, bug: Bug) -> str | None:
    """The same canaries, replaced by their opposites where the coin says so: what replace-one must
    hide.
    """
    return _audited(bench, bug, bug.billed, -1.0)


def _audited(bench: Bench, bug: Bug, adjacency: Adjacency, absent: float) -> str | None:
    """Run the audit against the claim; the family is asked only about the claim itself, so one
    curve is enough.
    """
    family = ClaimedFamily(lambda strength: bench.curve(strength, adjacency))
    epsilon = family.epsilon(1.0, bench.delta)
    claim = whitebox.AuditedClaim(
        epsilon, bench.delta, bench.noise_multiplier, bench.rate, family, absent
    )
    coins = [whitebox.fair_coins(dimension(bench), 11 + seed) for seed in RUNS]
    gains = [np.where(c, LENGTH, absent * LENGTH) for c in coins]
    seen = np.concatenate(
        [bench.updates(np.diag(g), bug, seed=seed) for g, seed in zip(gains, RUNS, strict=True)],
        axis=1,
    )
    if not np.isfinite(seen).all():
        return "an update is not finite"
    observed = whitebox.ObservedSums(seen, np.concatenate(coins), _layers(bench))
    allowed = (1 + family.advantage(1.0)) / 2
    name, right, counted, limit = whitebox.best_attack(observed, claim, 0.99)
    if limit <= allowed:
        return None
    return (
        f"{right} of {counted} coins guessed by {name}: at least {limit:.3f}, where the claim "
        f"allows {allowed:.3f}"
    )


def _layers(bench: Bench) -> dict[str, NDArray[np.bool_]]:
    """The canaries of each parameter tensor, over all runs."""
    positions = np.tile(np.arange(dimension(bench)), len(RUNS))
    return {
        name: (positions >= place.start) & (positions < place.stop)
        for name, place in bench.parameters.items()
    }


def sensitivity(bench: Bench, bug: Bug) -> str | None:
    """Without noise, at rate one: leaving one record out changes the sum by at most one clip norm,
    whatever the gradients.
    """
    for name, rows in _difficult(bench).items():
        whole = bench.updates(rows, bug, noise=0.0, rate=1.0, steps=1)[0]
        for left_out in (0, len(rows) // 2):
            without = bench.updates(
                np.delete(rows, left_out, 0), bug, noise=0.0, rate=1.0, steps=1
            )[0]
            change = float(np.linalg.norm(whole - without))
            if not change <= 1 + 1e-3:
                return f"leaving out one record changes the sum by {change:.3f} clip norms ({name})"
    return None


def _difficult(bench: Bench) -> dict[str, Array]:
    """Gradients that break wrong clipping: large, aligned, in the bias alone, in every layer, one
    giant among dwarfs.
    """
    d = dimension(bench)
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((9, d))
    dense *= LENGTH / np.linalg.norm(dense, axis=1, keepdims=True)
    bias = np.zeros((9, d))
    layered = np.zeros((9, d))
    for name, place in bench.parameters.items():
        layered[:, place.start] = LENGTH
        if name.endswith("bias"):
            bias[np.arange(9), place.start + np.arange(9) % (place.stop - place.start)] = LENGTH
    aligned = np.repeat(dense[:1], 9, 0)
    giant = 0.02 * dense
    giant[0] = 1000 * dense[0]
    return {
        "large": dense,
        "bias alone": bias,
        "in every layer": layered,
        "aligned": aligned,
        "one giant": giant,
    }


def not_a_number(bench: Bench, bug: Bug) -> str | None:
    """A record whose gradient is NaN or infinite adds exactly nothing."""
    seen, expected = bench.overflowing(bug)
    return (
        None
        if np.allclose(seen, expected, atol=1e-6)
        else "a record with a gradient that is not finite changed the sum"
    )


def permit(bench: Bench, bug: Bug) -> str | None:
    """No more steps are released than were billed: the ledger's permit refuses the next one."""
    released = len(bench.updates(np.zeros((4, dimension(bench))), bug))
    return (
        None if released <= bench.steps else f"{released} steps were released, {bench.steps} billed"
    )


def divisor(bench: Bench, bug: Bug) -> str | None:
    """Without noise, each record shows as one clip norm or not at all, however many records the
    batch happens to hold.
    """
    count = 24
    seen = bench.updates(
        LENGTH * np.eye(count, dimension(bench)), bug, noise=0.0, rate=0.5, steps=6
    )[:, :count]
    off = np.minimum(np.abs(seen), np.abs(seen - 1)).max()
    return (
        None
        if off < 1e-3
        else f"a clipped record shows as {seen.max():.3f} clip norms: the divisor depends on the "
        f"batch"
    )


def noise_alone(bench: Bench, bug: Bug) -> str | None:
    """Records without gradients: what is released is noise of the claimed scale, Gaussian,
    everywhere, fresh at every step.
    """
    from scipy.stats import kstest

    seen = bench.updates(np.zeros((4, dimension(bench))), bug, steps=40) / bench.noise_multiplier
    for name, place in bench.parameters.items():
        part = seen[:, place]
        if (part == 0).any():
            return f"{name}: {np.mean(part == 0):.0%} of the values have no noise"
        excess = (float(np.mean(part**2)) - 1) * math.sqrt(part.size / 2)
        if abs(excess) > SIGMAS:
            return (
                f"{name}: noise of {math.sqrt(np.mean(part**2)):.3f} of the claimed standard "
                f"deviation"
            )
    for axis, what in ((0, "step"), (1, "parameter")):
        if np.unique(seen, axis=axis).shape[axis] < seen.shape[axis]:
            return f"the noise of one {what} is used for another"
    echo = float((seen[1:] * seen[:-1]).mean() * math.sqrt(seen[1:].size))
    if abs(echo) > SIGMAS:
        return "the noise of one step is correlated with the noise of the next"
    if kstest(seen.reshape(-1), "norm").pvalue < 1e-6:
        return "the noise is not Gaussian"
    return None


def lattice(bench: Bench, bug: Bug) -> str | None:
    """Released values lie on one lattice of half-odd multiples, with records as without: no output
    is possible in one world only.
    """
    d = dimension(bench)
    alone = bench.updates(np.zeros((8, d)), bug, rate=1.0, steps=8)
    for place in bench.parameters.values():
        known = np.unique(alone[:, place])
        step = float(np.diff(known).min(initial=np.inf, where=np.diff(known) > 1e-9))
        if not step > 1e-3 * bench.noise_multiplier:
            return "noise alone lies on no lattice: an output can show which sum it was added to"
        for rows in (np.zeros((8, d)), np.eye(8, d) * 0.37, np.full((8, d), 0.1 / math.sqrt(d))):
            seen = bench.updates(rows, bug, rate=1.0, steps=2)[:, place] / step - 0.5
            if (off := np.abs(seen - np.round(seen)).max()) > 1e-2:
                return (
                    f"a released value lies {off:.2f} steps off the lattice of the noise: it is "
                    f"impossible without the record"
                )
    return None


def exact_noise(bench: Bench, bug: Bug) -> str | None:
    """Exact noise, under one secret: a sum moves every value by the whole steps in it or by one
    more, and by itself in the mean.
    """
    d, steps = dimension(bench), 12

    def seen(gradient: float) -> Array:
        return bench.updates(
            np.full((1, d), gradient), bug, rate=1.0, steps=steps, seed=51, exact=True
        )

    alone = seen(0.0)
    known = np.diff(np.unique(alone))
    step = float(known.min(initial=np.inf, where=known > 1e-9))
    for gradient in (0.31 * step, -0.17 * step, 0.02 / math.sqrt(d)):
        moved, expected = (seen(gradient) - alone) / step, gradient / step
        if (
            np.abs(moved - expected).max() >= 1 + 1e-6
            or np.abs(moved - np.round(moved)).max() > 1e-6
        ):
            return (
                f"a sum of {expected:.2f} steps moves a value by "
                f"{moved[np.abs(moved - expected).argmax() // d].max():.2f}"
            )
        spread = math.sqrt(abs(expected) % 1 * (1 - abs(expected) % 1) / moved.size)
        if abs(off := float(moved.mean()) - expected) > SIGMAS * spread:
            return (
                f"a sum of {expected:.3f} steps moves values by {expected + off:.3f} in the mean: "
                f"the rounding is biased"
            )
    if np.unique(alone, axis=0).shape[0] < steps:
        return "the noise of one step is used for another"
    return None


def noise_and_data(bench: Bench, bug: Bug) -> str | None:
    """The scale of the noise is public: it is the same for short and for long gradients."""
    d = dimension(bench)
    for length in (0.01, LENGTH):
        rows = length * np.eye(8, d)
        quiet = bench.updates(rows, bug, rate=1.0, steps=6)[:, 8:] / bench.noise_multiplier
        scale = math.sqrt(float(np.mean(quiet**2)))
        if abs(scale - 1) > SIGMAS / math.sqrt(2 * quiet.size):
            return (
                f"with gradients of {length} clip norms the noise has {scale:.3f} of its claimed "
                f"scale"
            )
    return None


def secret(bench: Bench, bug: Bug) -> str | None:
    """Two runs with different secrets share no noise."""
    blank = np.zeros((4, dimension(bench)))
    one, other = (bench.updates(blank, bug, steps=2, seed=s).reshape(-1) for s in (21, 22))
    alike = abs(float(np.corrcoef(one, other)[0, 1])) * math.sqrt(one.size)
    return (
        None
        if alike < SIGMAS
        else f"the noise of two runs is alike ({alike:.0f} standard deviations): it is not the "
        f"secret's"
    )


def resumed(bench: Bench, bug: Bug) -> str | None:
    """A run that was left and resumed releases the same bits as one that was not: no step is
    released twice with other noise.
    """
    rows = np.eye(8, dimension(bench))
    whole, halves = (bench.updates(rows, bug, steps=6, seed=31, interrupt=at) for at in (None, 3))
    return (
        None
        if np.array_equal(whole, halves)
        else "a resumed run releases other values than an uninterrupted one"
    )


def spent(bench: Bench, bug: Bug) -> str | None:
    """The noise of a step is for one sum: a step that is released again, after an error or a crash,
    is released with the same bits.
    """
    for what, released in bench.again(bug):
        first: dict[int, Array] = {}
        for step, seen in released:
            if not np.array_equal(kept := first.setdefault(step, seen), seen):
                apart = float(np.linalg.norm(kept - seen))
                return (
                    f"after {what} step {step} is released again: the difference, {apart:.3f} clip "
                    f"norms, has no noise"
                )
    return None


def beside(bench: Bench, bug: Bug) -> str | None:
    """What a run releases goes through the noise: a run whose weights, optimizer or buffers others
    write to ends before the next step.
    """
    for what, steps in bench.beside(bug):
        if steps:
            return f"after {what} the run made {steps} more steps"
    return None


def sampling(bench: Bench, bug: Bug) -> str | None:
    """Who takes part when, over 400 steps: rate, independence over steps, over records, and of
    consecutive batches.
    """
    from scipy.stats import chi2

    steps, records, rate = 400, 200, bench.rate
    there = bench.batches(bug, records, steps).astype(float)
    spread = rate * (1 - rate)
    if abs(z := (there.sum() - there.size * rate) / math.sqrt(there.size * spread)) > SIGMAS:
        return (
            f"records take part at rate {there.mean():.4f}, billed {rate:.4f} ({z:+.0f} standard "
            f"deviations)"
        )
    for axis, who in ((0, "a record's participations"), (1, "batch sizes")):
        counts = there.sum(axis)
        n = there.shape[axis]
        statistic = float(((counts - n * rate) ** 2).sum() / (n * spread))
        tail = min(chi2.cdf(statistic, len(counts)), chi2.sf(statistic, len(counts)))
        if tail < 1e-6:
            return (
                f"{who} vary {statistic / len(counts):.2f} times as much as independent coins would"
            )
    overlap = float((there[1:] * there[:-1]).sum())
    expected = (steps - 1) * records * rate**2
    if abs(overlap - expected) > SIGMAS * math.sqrt(2 * expected):
        return "consecutive batches share more or fewer records than independent ones"
    return None


def correlated(bench: Bench, bug: Bug) -> str | None:
    """Correlated noise, streamed through a resumption, is what the strategy's matrix says: the bill
    is for that matrix.
    """
    for name, streamed, dense in bench.correlated(bug):
        rows, step = (
            np.abs(streamed - dense).max(1),
            0.1,
        )  # a value lies in the cell of its lattice, far smaller than this
        if not (rows < step).all():
            return (
                f"{name}: the noise of step {int(np.argmax(rows >= step))} is not the row of the "
                f"billed matrix"
            )
    return None


def tied(bench: Bench, bug: Bug) -> str | None:
    """A weight that is used twice has one gradient: the sum of both uses, and its norm is the norm
    of the sum.
    """
    size = bench.tied_contribution(bug)
    return (
        None
        if size <= 1 + 1e-3
        else f"one example adds {size:.3f} clip norms to a model that uses a layer twice"
    )


def cancelling(bench: Bench, bug: Bug) -> str | None:
    """Where two uses of a weight nearly cancel, squares lose the digits of the difference: the norm
    must still be no less.
    """
    size = bench.cancelling_contribution(bug)
    return (
        None
        if size <= 1
        else f"one example adds {size:.3f} clip norms to a model whose uses of a layer nearly "
        f"cancel"
    )


def batch_statistics(bench: Bench, bug: Bug) -> str | None:
    """A model that normalises over the batch is refused. (For the code as it is there is no such
    model to refuse.)
    """
    return bench.batchnorm_refusal(bug) if bug.batchnorm else None


def isolation(bench: Bench, bug: Bug) -> str | None:
    """A loss through which examples reach each other ends the run before anything is released."""
    taken = [what for what, accepted in bench.mixed(bug) if accepted]
    return f"a run takes losses that mix examples by {' and by '.join(taken)}" if taken else None


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "white-box audit": white_box,
    "replace-one audit": replaced,
    "sensitivity": sensitivity,
    "not a number": not_a_number,
    "permit": permit,
    "divisor": divisor,
    "noise alone": noise_alone,
    "noise and data": noise_and_data,
    "lattice": lattice,
    "exact noise": exact_noise,
    "secret": secret,
    "resumed": resumed,
    "spent": spent,
    "beside": beside,
    "sampling": sampling,
    "correlated noise": correlated,
    "tied weights": tied,
    "cancelling uses": cancelling,
    "batch statistics": batch_statistics,
    "isolation": isolation,
    **sums.CHECKS,
    **labels.CHECKS,
    **owners.CHECKS,
    **clients.CHECKS,
    **people.CHECKS,
    **answers.CHECKS,
    **learners.CHECKS,
    **searches.CHECKS,
    **tables.CHECKS,
    **pictures.CHECKS,
    **evolutions.CHECKS,
}


def run(name: str, bench: Bench, bug: Bug) -> str | None:
    """One check; a typed refusal by the pipeline itself counts as caught, and says so."""
    try:
        return CHECKS[name](bench, bug)
    except DpfyError as refusal:
        return f"refused by the pipeline: {refusal}"
