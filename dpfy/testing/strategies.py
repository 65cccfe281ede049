"""The contract of a noise strategy: the noise that is streamed is the noise that is charged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise import noise_buffers
from dpfy.noise.strategy import Grads, Recurrent, State, Strategy
from dpfy.testing.contract import check_frozen_data, refused, require, typed_refusals

Matrix = NDArray[np.float64]

LINEAR = "The noise of a step is a fixed linear combination of independent draws."
OWN = "Every step has noise of its own: no combination of the noise of other steps removes it."
SENSITIVITY = "The claimed sensitivity is at least that of the noise that is streamed."
SAMPLED = "Under sampling, steps that one record may take part in have independent noise."
SOME_PATTERN = "The strategy supports at least one of the participation patterns."
STATE = "The state is a dictionary of named tensors."
RESUMED = "A run that goes on from a saved state makes the same bits."
ALONE = "All that a run remembers is in its state: two runs do not touch each other."
LOST = "A state that was lost is refused: noise without its past would not be what was charged."
LIKE = "Noise has the names, shapes and number type of the draws."
MATRIX = "The matrices that the strategy states are those of its stream."
RECURRENCE = "`recurrence` says what `next` does."
FRESH = "`fresh` is about the weight of a step's own draws: between half and twice as much."
SINGLE = "Noise in single precision follows noise in double precision."
ROUNDING, SINGLE_ROUNDING = 1e-7, 2e-5
"""Relative differences that arithmetic may cause, in sums of double and of single precision."""
MOST_SETS = 3000
"""How many sets of participations are tried at most for one pattern."""


def check_strategy(
    strategy: Strategy,
    *,
    steps: int = 12,
    participations: Sequence[patterns.Participation] | None = None,
    streams: bool = True,
    seed: int = 0,
    thorough: bool = False,
) -> None:
    """Check that a noise strategy keeps its contract (:class:`dpfy.noise.strategy.Strategy`).

    The matrix of the stream is read off by unit draws, so a strategy needs no dense matrix of its
    own to be checked.

    Args:
        strategy: The strategy to check.
        steps: The length of the run. A strategy for a fixed number of steps is given that number.
        participations: Patterns whose sensitivity is checked; by default one of each kind. Those
            that the strategy refuses with `Unsupported` are skipped, all but one.
        streams: False for a strategy whose noise is made elsewhere; `next` must then refuse.
        seed: Fixes all randomness of the check.
        thorough: Also try runs of other lengths, and more patterns and sets of participations.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        A strategy that passes keeps, in the settings tried:

        - noise is a fixed linear combination of the draws, of the names, shapes and number type of
          what it is added to;
        - the claimed sensitivity is at least that of the streamed noise, for every pattern that it
          accepts, up to a relative 1e-7: no set of participations that was tried moves the
          whitened releases by more;
        - under sampling, noise of steps that one record may take part in is independent;
        - all that is remembered is in the state, so that two runs do not touch each other;
        - the state survives a file at every step without a change of one bit, and a lost state is
          refused;
        - `noise_matrix`, `encoder`, `recurrence` and `fresh`, where there are any, describe the
          stream;
        - the strategy is frozen data that JSON brings back equal.

    Example:
        >>> from dpfy.noise.toeplitz import Banded
        >>> from dpfy.testing import check_strategy
        >>> check_strategy(Banded((1.0, 0.5, 0.25)), steps=8)
    """
    check_frozen_data(strategy, "strategy")
    lengths = [steps]
    if thorough:
        for other in (1, 2, steps + 5, 3 * steps):
            if refused(_Setting(strategy, other, seed).require_length) is None:
                lengths.append(other)
    for length in lengths:
        setting = _Setting(strategy, length, seed)
        given = participations or _usual(length, thorough)
        if not streams:
            _check_elsewhere(setting, given)
            continue
        matrix = setting.matrix()
        setting.check_own(matrix)
        setting.check_linear(matrix)
        setting.check_single(matrix)
        setting.check_resumed()
        setting.check_alone()
        setting.check_lost()
        setting.check_stated(matrix)
        setting.check_fresh(matrix)
        setting.check_sensitivity(matrix, given, MOST_SETS * (5 if thorough else 1))


def _usual(steps: int, thorough: bool) -> list[patterns.Participation]:
    """One pattern of each kind that fits a run of these steps."""
    quarter, half = max(1, steps // 4), max(1, steps // 2)
    found: list[patterns.Participation] = [
        patterns.SinglePass(),
        patterns.FixedOrder(quarter, -(-steps // quarter)),
        patterns.Reshuffled(half, -(-steps // half)),
        patterns.Separated(quarter, 3),
        patterns.CyclicPoisson(0.1, quarter),
        patterns.Poisson(0.1),
        patterns.WithoutReplacement(5, 50),
        *[
            patterns.SecretBins(bins, steps // bins)
            for bins in (quarter, half)
            if steps % bins == 0
        ],
    ]
    if thorough:
        found += [
            patterns.FixedOrder(1, steps),
            patterns.Reshuffled(quarter, -(-steps // quarter)),
            patterns.Separated(1, 2),
            patterns.Separated(2, steps),
            patterns.Separated(half, 2),
            patterns.CyclicPoisson(0.5, half),
            patterns.Poisson(1.0),
        ]
    return found


@dataclass
class _Setting:
    """A strategy in a run of some length."""

    strategy: Strategy
    steps: int
    seed: int
    columns: dict[int, int] = field(default_factory=dict)
    """Of each address that was drawn, its place among the independent draws."""

    def __str__(self) -> str:
        return f"{_short(self.strategy)}, {self.steps} steps"

    @property
    def width(self) -> int:
        """How many addresses a run may draw from."""
        return 8 * self.steps + 64

    def column(self, address: int) -> int:
        """The place of an address, given out in the order of the first draws."""
        place = self.columns.setdefault(int(address), len(self.columns))
        where = f"{self}, address {address}"
        require(int(address) >= 0, LINEAR, where, "an address of a draw is negative")
        require(place < self.width, LINEAR, where, f"{place + 1} addresses are drawn from")
        return place

    def require_length(self) -> None:
        """Run to the end; a strategy for another number of steps raises."""
        self.strategy.sensitivity(patterns.SinglePass(), self.steps)
        self.stream({"w": torch.zeros(1)})

    def stream(
        self, like: Grads, draws: Grads | None = None, *, saved: bool = False
    ) -> dict[str, Tensor]:
        """The noise of a run, [steps, ...] for each name; unit draws where none are given."""
        rows: dict[str, list[Tensor]] = {name: [] for name in like}
        with typed_refusals(LINEAR, str(self)):
            state = self.strategy.init(like)
        for step in range(self.steps):
            self._require_state(state, step)
            with typed_refusals(LINEAR, f"{self}, step {step}"):
                noise, state = self.strategy.next(
                    step, lambda address: self._draw(like, draws, address), state
                )
            self._require_like(noise, like, step)
            for name, value in noise.items():
                rows[name].append(value.clone())
            if saved:
                state = load(save({name: t.contiguous() for name, t in state.items()}))
        return {name: torch.stack(held) for name, held in rows.items()}

    def _draw(self, like: Grads, draws: Grads | None, address: int) -> Grads:
        place = self.column(address)
        if draws is not None:
            return {name: t[place].clone() for name, t in draws.items()}
        unit = {name: torch.zeros_like(t) for name, t in like.items()}
        for t in unit.values():
            t.view(-1)[place % t.numel()] = 1.0
        return unit

    def _require_state(self, state: State, step: int) -> None:
        good = isinstance(state, dict) and all(
            isinstance(name, str) and isinstance(t, Tensor) for name, t in state.items()
        )
        require(good, STATE, f"{self}, step {step}", f"it is a {type(state).__name__}")

    def _require_like(self, noise: Grads, like: Grads, step: int) -> None:
        made = {name: (tuple(t.shape), t.dtype) for name, t in noise.items()}
        due = {name: (tuple(t.shape), t.dtype) for name, t in like.items()}
        require(made == due, LIKE, f"{self}, step {step}", f"{made} where it must be {due}")

    def matrix(self) -> Matrix:
        """[steps, draws]: row t is the noise of step t, read off by unit draws."""
        found = self.stream({"w": torch.zeros(self.width, dtype=torch.float64)})["w"].numpy()
        matrix: Matrix = found[:, : len(self.columns)]
        require(
            bool(np.isfinite(matrix).all()), LINEAR, str(self), "the noise of unit draws overflows"
        )
        return matrix

    def check_own(self, matrix: Matrix) -> None:
        """The covariance of all noise can be inverted."""
        singular = np.linalg.svd(matrix, compute_uv=False)
        require(
            len(singular) == self.steps and bool(singular[-1] > 1e-9 * singular[0]),
            OWN,
            str(self),
            f"the smallest singular value of the noise is {singular[-1]:.3g}",
        )

    def check_linear(self, matrix: Matrix) -> None:
        """Random draws for tensors of several shapes."""
        like = {
            "layer.weight": torch.zeros(3, 2, dtype=torch.float64),
            "scale": torch.zeros((), dtype=torch.float64),
        }
        self._check_same(like, matrix, LINEAR, ROUNDING)

    def check_single(self, matrix: Matrix) -> None:
        """The same in single precision."""
        self._check_same({"w": torch.zeros(4)}, matrix, SINGLE, SINGLE_ROUNDING)

    def _check_same(self, like: Grads, matrix: Matrix, property: str, tolerance: float) -> None:
        draws = _random(like, self.width, self.seed)
        largest = np.abs(matrix).sum(1).max()
        for name, made in self.stream(like, draws).items():
            held = draws[name][: matrix.shape[1]].double()
            due = torch.tensordot(torch.from_numpy(matrix), held, dims=1)
            off = float((made.double() - due).abs().max() / largest)
            require(
                off <= tolerance,
                property,
                f"{self}, the tensor {name!r}",
                f"it is off by {off:.3g}",
            )

    def check_resumed(self) -> None:
        """The state goes through the bytes of a file after each step."""
        for dtype in (torch.float32, torch.float64):
            like = {"a.b": torch.zeros(5, dtype=dtype), "c": torch.zeros(2, 2, dtype=dtype)}
            draws = _random(like, self.width, self.seed + 1)
            whole, resumed = self.stream(like, draws), self.stream(like, draws, saved=True)
            for name, made in whole.items():
                differ = torch.nonzero((made != resumed[name]).flatten(1).any(1)).flatten()
                require(
                    not len(differ),
                    RESUMED,
                    f"{self}, {dtype}",
                    f"the noise of step {differ[:1].tolist()} differs",
                )

    def check_alone(self) -> None:
        """Two runs with different draws, a step of one and a step of the other."""
        like = {"w": torch.zeros(3, dtype=torch.float64)}
        runs = [_random(like, self.width, self.seed + number) for number in (4, 5)]
        alone = [self.stream(like, draws)["w"] for draws in runs]
        states = [self.strategy.init(like) for _ in runs]
        for step in range(self.steps):
            for run, draws in enumerate(runs):
                draw = partial(self._draw, like, draws)
                made, states[run] = self.strategy.next(step, draw, states[run])
                same = torch.equal(made["w"], alone[run][step])
                require(same, ALONE, f"{self}, step {step}", "its noise depends on another run")

    def check_lost(self) -> None:
        """An empty state in the middle of a run: refused, or nothing is remembered."""
        like = {"w": torch.zeros(3, dtype=torch.float64)}
        draws = _random(like, self.width, self.seed + 2)
        state = self.strategy.init(like)
        for step in range(self.steps):
            kept = {name: t.clone() for name, t in state.items()}
            made, state = self.strategy.next(step, lambda s: self._draw(like, draws, s), kept)
            try:
                again, _ = self.strategy.next(step, lambda s: self._draw(like, draws, s), {})
            except (InvalidInput, Unsupported):
                continue
            except Exception as error:
                require(False, LOST, f"{self}, step {step}", f"{type(error).__name__}: {error}")
            same = torch.equal(again["w"], made["w"])
            require(same, LOST, f"{self}, step {step}", "other noise was made without a state")

    def check_stated(self, matrix: Matrix) -> None:
        """`noise_matrix`, `encoder` and `recurrence`, where the strategy has them."""
        covariance = matrix @ matrix.T
        scale = np.abs(covariance).max()
        if (stated := getattr(self.strategy, "noise_matrix", None)) is not None:
            own = np.asarray(stated(self.steps))
            off = np.abs(own @ own.T - covariance).max() / scale
            require(bool(off < ROUNDING), MATRIX, str(self), f"noise_matrix differs by {off:.3g}")
        if (stated := getattr(self.strategy, "encoder", None)) is not None:
            encoder = np.asarray(stated(self.steps))
            if encoder.shape == (self.steps, self.steps):
                off = np.abs(encoder @ covariance @ encoder.T - np.eye(self.steps)).max()
                require(
                    bool(off < ROUNDING * 10), MATRIX, str(self), f"encoder differs by {off:.3g}"
                )
        if isinstance(self.strategy, Recurrent):
            self._check_recurrence()

    def _check_recurrence(self) -> None:
        """Where the sums are, noise is made from the recurrence alone."""
        assert isinstance(self.strategy, Recurrent)
        like = {"w": torch.zeros(3, dtype=torch.float64)}
        draws = _random(like, self.width, self.seed + 3)
        streamed, state = self.stream(like, draws)["w"], self.strategy.init(like)
        for step in range(self.steps):
            recurrence = self.strategy.recurrence(step)
            noise = noise_buffers.noise(
                recurrence, step, lambda s: self._draw(like, draws, s), state
            )
            off = float((noise["w"] - streamed[step]).abs().max())
            require(off < 1e-9, RECURRENCE, f"{self}, step {step}", f"they differ by {off:.3g}")

    def check_fresh(self, matrix: Matrix) -> None:
        """The weights of draws that no earlier step used."""
        used = np.zeros(matrix.shape[1], dtype=bool)
        for step, row in enumerate(matrix):
            own = float(np.linalg.norm(row[~used]))
            used |= row != 0
            fresh = self.strategy.fresh(step)
            require(
                own / 2 <= fresh <= 2 * own,
                FRESH,
                f"{self}, step {step}",
                f"{fresh!r} where its own draws have a weight of {own:.6g}",
            )

    def check_sensitivity(
        self, matrix: Matrix, given: Sequence[patterns.Participation], most: int
    ) -> None:
        """What records can do to the whitened releases, against what is claimed."""
        precision: Matrix = np.linalg.inv(matrix @ matrix.T).astype(np.float64)
        accepted = 0
        for pattern in given:
            claimed = self.claimed(pattern)
            if claimed is None:
                continue
            accepted += 1
            where = f"{self}, {pattern!r}"
            _check_independent(precision, pattern, where)
            rng = np.random.default_rng(self.seed)
            found = max(
                _largest(precision, places, rng) for places in _sets(pattern, self.steps, most, rng)
            )
            require(
                claimed >= found * (1 - ROUNDING),
                SENSITIVITY,
                where,
                f"{claimed:.9g} is claimed, and a record can reach {found:.9g}",
            )
        require(accepted > 0, SOME_PATTERN, str(self), f"all {len(given)} are refused")

    def claimed(self, pattern: patterns.Participation) -> float | None:
        """The sensitivity that the strategy states; None where it refuses the pattern."""
        where = f"{self}, {pattern!r}"
        try:
            claimed = self.strategy.sensitivity(pattern, self.steps)
        except (Unsupported, InvalidInput):
            return None
        except Exception as error:
            require(False, SENSITIVITY, where, f"{type(error).__name__}: {error}")
        positive = isinstance(claimed, float | int) and 0 < claimed < np.inf
        require(positive, SENSITIVITY, where, f"{claimed!r} is claimed")
        return float(claimed)


def _check_elsewhere(setting: _Setting, given: Sequence[patterns.Participation]) -> None:
    """A strategy whose noise is made elsewhere makes none, and claims one contribution a step."""
    property = "A strategy whose noise is made elsewhere refuses to make any (`Unsupported`)."
    like = {"w": torch.zeros(2)}
    try:
        setting.strategy.next(0, lambda address: setting._draw(like, None, address), {})
    except Unsupported:
        pass
    else:
        require(False, property, str(setting), "it made noise")
    claims = {repr(p): c for p in given if (c := setting.claimed(p)) is not None}
    require(bool(claims), SOME_PATTERN, str(setting), f"all {len(given)} are refused")
    for pattern, claimed in claims.items():
        require(claimed >= 1, SENSITIVITY, f"{setting}, {pattern}", f"{claimed} is claimed")


def _random(like: Grads, addresses: int, seed: int) -> Grads:
    """Fixed draws: row s of each tensor is the draw of address s."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(addresses, *t.shape, dtype=t.dtype, generator=generator)
        for name, t in like.items()
    }


def _check_independent(precision: Matrix, pattern: patterns.Participation, where: str) -> None:
    """Sampled steps are composed one by one: noise of steps that a record may share is independent.

    The inverse of the covariance must vanish between them, so that their contributions never meet.
    """
    if isinstance(pattern, patterns.Poisson | patterns.WithoutReplacement):
        apart = 1
    elif isinstance(pattern, patterns.CyclicPoisson):
        apart = pattern.cycle
    else:
        return
    steps = len(precision)
    scale = float(np.abs(precision).max())
    for shift in range(apart, steps, apart):
        off = float(np.abs(np.diagonal(precision, shift)).max())
        require(
            off <= ROUNDING * scale,
            SAMPLED,
            where,
            f"the noise of steps {shift} apart is correlated ({off / scale:.3g})",
        )


def _sets(
    pattern: patterns.Participation, steps: int, most: int, rng: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    """Sets of steps in which one record may take part; a sample where there are many."""
    if isinstance(pattern, patterns.FixedOrder):
        yield from _periodic(steps, pattern.steps_per_epoch, pattern.epochs)
    elif isinstance(pattern, patterns.SecretBins):
        yield from _periodic(steps, pattern.bins, pattern.epochs)
    elif isinstance(pattern, patterns.Reshuffled):
        yield from _by_epoch(steps, pattern, most, rng)
    elif isinstance(pattern, patterns.Separated):
        yield from _apart(steps, pattern, most, rng)
    else:
        # A single pass, or sampling: participations of one record do not meet.
        yield from ((step,) for step in range(steps))


def _periodic(steps: int, period: int, epochs: int) -> Iterator[tuple[int, ...]]:
    for start in range(min(period, steps)):
        places = tuple(range(start, steps, period))[:epochs]
        for length in range(1, len(places) + 1):
            yield places[:length]
            yield places[len(places) - length :]


def _by_epoch(
    steps: int, pattern: patterns.Reshuffled, most: int, rng: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    size, epochs = (
        pattern.steps_per_epoch,
        min(pattern.epochs, -(-steps // pattern.steps_per_epoch)),
    )
    if size**epochs <= most:
        choices: Iterator[tuple[int, ...]] = itertools.product(range(size), repeat=epochs)
    else:
        # The last place of one epoch and the first of the next lie side by side.
        edges = itertools.product((0, size - 1), repeat=min(epochs, 10))
        padded = ((*edge, *[0] * (epochs - len(edge))) for edge in edges)
        drawn = (tuple(rng.integers(size, size=epochs).tolist()) for _ in range(most))
        choices = itertools.chain(padded, drawn)
    for places in choices:
        found = tuple(e * size + p for e, p in enumerate(places) if e * size + p < steps)
        if found:
            yield found


def _apart(
    steps: int, pattern: patterns.Separated, most: int, rng: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    yield from _periodic(steps, pattern.separation, pattern.most)
    for _ in range(most):
        places: list[int] = []
        at = int(rng.integers(steps))
        while at < steps and len(places) < pattern.most:
            places.append(at)
            at += pattern.separation + int(rng.geometric(0.5)) - 1
        yield tuple(places)


def _largest(precision: Matrix, places: tuple[int, ...], rng: np.random.Generator) -> float:
    """A lower bound on the largest whitened norm over contributions of norm at most one a step.

    Scalar contributions of 1 or -1: all signs where there are few, else from a few starts each
    sign is turned as long as that helps.
    """
    part = precision[np.ix_(places, places)]
    count = len(places)
    if count <= 6:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=count - 1)))
        signs = np.hstack([np.ones((len(signs), 1)), signs]) if count > 1 else np.ones((1, 1))
        return float(np.sqrt(np.einsum("ki,ij,kj->k", signs, part, signs).max()))
    best = 0.0
    for start in (np.ones(count), np.sign(rng.normal(size=count))):
        for _ in range(4):
            for place in range(count):
                others = part[place] @ start - part[place, place] * start[place]
                start[place] = 1.0 if others >= 0 else -1.0
        best = max(best, float(start @ part @ start))
    return float(np.sqrt(best))


def _short(strategy: Strategy) -> str:
    text = repr(strategy)
    return text if len(text) <= 80 else f"{text[:77]}..."
