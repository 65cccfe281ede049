"""What the self-test needs from a training pipeline, and what a bug may replace in it. The audit
itself imports no pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Part = Callable[[Any], Any]


def same(part: Any) -> Any:
    """The part as it is."""
    return part


@dataclass(frozen=True)
class Bug:
    """A classic mistake, as the parts it replaces. Each replacement is given the real part; the
    claim stays what it was.

    `restored` gets (the saved noise state, a fresh one) when a correlated run resumes. `billed` is
    the adjacency whose curve is claimed for replaced canaries. `batchnorm` leaves a BatchNorm in
    the model; `replayed` says which operations are run again to see whether examples mix.
    `after_error` is given a training whose step failed behind its noise, `after_entry` a training
    that has begun. `scheme` is how clients encode their vectors and add shares of noise,
    `aggregator` who sums them. `grouped` is how records lie by user, `cohort` how updates of
    clients are taken. `labels` is given the parts of a release of labels, `protocol` a local
    protocol, `join` the function that makes one loss of a user's, `prediction` the parts of private
    answers. `learner` replaces functions of the estimators, each by its full name, in the cases
    whose names begin with `case`. Of a search for settings, `trials` is given what draws their
    number, `shown` what says which outputs leave it, `scored` and `held_out` are given a trial, and
    `proposed` what proposes settings, with the list of scores so far. `synthesis` is given the
    steps of a synthetic table, `pictures` those of synthetic images, `evolution` those of private
    evolution. `caught_by` names the check that must catch it.
    """

    name: str
    words: str
    caught_by: str
    engine: Part = same
    sampler: Part = same
    stream: Part = same
    strategy: Part = same
    restored: Callable[[Any, Any], Any] = lambda saved, fresh: saved
    steps: int | None = None
    billed: Adjacency = Adjacency.REPLACE_ONE
    batchnorm: bool = False
    replayed: Part = same
    after_error: Part = same
    after_entry: Part = same
    scheme: Part = same
    aggregator: Part = same
    grouped: Part = same
    cohort: Part = same
    labels: Part = same
    protocol: Part = same
    join: Part = same
    prediction: Part = same
    learner: Mapping[str, Part] = field(default_factory=dict)
    case: str = ""
    trials: Part = same
    shown: Part = same
    scored: Part = same
    held_out: Part = same
    proposed: Callable[[Any, list[float]], Any] = lambda engine, scores: engine
    synthesis: Part = same
    pictures: Part = same
    evolution: Part = same


AS_SHIPPED = Bug("as shipped", "the code as it is", "")


class Bench(Protocol):
    """A small training configuration on which bugs are switched in. Gradients and updates are flat,
    in clip norms.
    """

    @property
    def parameters(self) -> Mapping[str, slice]:
        """Where each parameter tensor lies in the flat vector."""

    @property
    def noise_multiplier(self) -> float:
        """Of the claim."""

    @property
    def rate(self) -> float:
        """Of the claim."""

    @property
    def steps(self) -> int:
        """Of the claim."""

    @property
    def delta(self) -> float:
        """Of the claim."""

    def curve(self, strength: float, adjacency: Adjacency) -> Curve:
        """The claimed curve, with the noise divided by `strength`."""

    def updates(
        self,
        rows: Array,
        bug: Bug,
        *,
        noise: float | None = None,
        rate: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        interrupt: int | None = None,
        exact: bool = False,
    ) -> Array:
        """Train on records with these gradients; the noisy sums that the attacker sees, [steps,
        parameters]. `exact`: with exact noise.
        """

    def batches(self, bug: Bug, records: int, steps: int) -> NDArray[np.bool_]:
        """[steps, records]: who takes part when."""

    def of_users(self, owners: NDArray[np.int64], most: int, bug: Bug, *, single: bool) -> Array:
        """The sum, without noise, over all users of equal long records that `owners` own; or
        `single`, over all records that are used.
        """

    def of_round(self, sent: dict[int, list[Array]], bug: Bug) -> Array:
        """The sum of a round, without noise, in clip norms: the move of the model times the
        expected cohort. `sent`: by client.
        """

    def correlated(self, bug: Bug) -> Iterable[tuple[str, Array, Array]]:
        """For each correlated strategy: its noise as streamed through a resumption, and as its
        matrix says.
        """

    def overflowing(self, bug: Bug) -> tuple[Array, Array]:
        """The sum over a batch with one record whose gradient overflows, and the sum over the
        others alone.
        """

    def tied_contribution(self, bug: Bug) -> float:
        """The contribution of one example to a model that uses one layer twice, in clip norms."""

    def cancelling_contribution(self, bug: Bug) -> float:
        """The contribution of one example to a model whose two uses of a layer nearly cancel, in
        float32, in clip norms.
        """

    def batchnorm_refusal(self, bug: Bug) -> str | None:
        """How a model with BatchNorm is refused; None if it trains."""

    def mixed(self, bug: Bug) -> Iterable[tuple[str, bool]]:
        """Losses that mix examples, and whether a run took them."""

    def again(self, bug: Bug) -> Iterable[tuple[str, list[tuple[int, Array]]]]:
        """What is released, (step, noisy sum) in order, by a loop that goes on with other gradients
        after an error, and after a crash.
        """

    def shared(self, bug: Bug, *, signal: bool) -> tuple[Any, Array, Array]:
        """What is billed of a round of clients with noise in shares (`share`, `shares`); sums of
        rounds, on vectors of zero or not; the true sums.
        """

    def moved(self, bug: Bug) -> Iterable[tuple[str, float, int]]:
        """For vectors of one client: how far its message moves with them, squared, and what is
        billed.
        """

    def too_few(self, bug: Bug) -> tuple[int, int] | None:
        """(survivors, billed) of a round with too few survivors, if it was released."""

    def reports(
        self, bug: Bug
    ) -> Iterable[tuple[str, float, NDArray[np.int64], NDArray[np.int64]]]:
        """For each local protocol: name, claimed epsilon, and reports on two values, as numbers of
        what an attacker tells apart.
        """

    def label_answers(
        self, bug: Bug
    ) -> Iterable[tuple[str, float, NDArray[np.int64], NDArray[np.int64]]]:
        """For each way to answer for labels: name, claimed epsilon, and what is seen of records
        with one label, and with another.
        """

    def labels_replayed(self, bug: Bug) -> Iterable[tuple[str, bool, bool]]:
        """For each way, with answers replayed on other labels: whether questions, and what is
        learnt, stay the same.
        """

    def labels_asked(self, bug: Bug) -> Iterable[tuple[str, int]]:
        """For each way, in how many questions a label took part at most."""

    def kept_answers(self, bug: Bug) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """The claimed epsilon of a protocol that keeps an answer, and guesses from many reports of
        devices with one value, and another.
        """

    def votes_moved(self, bug: Bug) -> int:
        """By how much the counts of votes on a question change at most, in all, when one owner
        leaves.
        """

    def answer_bills(self, bug: Bug) -> tuple[int, list[tuple[int, int]]]:
        """Answers that are paid for; for every release, over restarts, its number and how many the
        disk said might be made by then.
        """

    def checks_counted(self, bug: Bug) -> tuple[int, int]:
        """Questions that were checked for agreement, and checks that were taken from what was paid
        for.
        """

    def asked_again(self, bug: Bug) -> tuple[int, int]:
        """How many different answers one question had that was asked many times, and how many were
        paid for.
        """

    def bill_moved(self, bug: Bug) -> tuple[float, float]:
        """By how much one voter moves at most what the bill of votes gets its noise for, and for
        what the noise is made.
        """

    def bills_stated(self, bug: Bug) -> tuple[int, int]:
        """How many bills of votes were stated, and how many of them were below the truth."""

    def cards_of_answers(self, bug: Bug) -> tuple[str, str]:
        """What the cards of two services on other data say before any answer."""

    def students(self, bug: Bug) -> tuple[bytes, bytes, bool]:
        """The files of students of teachers on other data that answer alike; and whether they
        did.
        """

    def users(
        self, rows: Array, owners: NDArray[np.int64], bug: Bug, *, noise: float, steps: int = 1
    ) -> Array:
        """Train on records of users with these gradients, all users in every batch; the noisy sums,
        [steps, parameters].
        """

    def beside(self, bug: Bug) -> Iterable[tuple[str, int]]:
        """For each way to change a run from outside: how many steps it made after the change."""

    def fits(self, bug: Bug, promise: str) -> Iterable[tuple[str, str, float, float]]:
        """Fits of classical learners: (case, what was looked at, what was found, what is allowed),
        for one kind of promise: "neighbours", "noise" or "minima".
        """

    def selected(self, bug: Bug, *, canary: bool) -> tuple[float, NDArray[np.int64]]:
        """Claimed epsilon of a search, and what left many of them that love the trial which
        memorises a canary, there or not.
        """

    def scores(self, bug: Bug) -> tuple[float, Array, Array]:
        """Of the trials of a search on records held out: the noise of a score that is billed,
        scores as they are used, and exact ones.
        """

    def parts(self, bug: Bug) -> tuple[set[int], set[int]]:
        """Records that trials of a search were trained on, and those that they were scored on."""

    def proposals(self, bug: Bug, *, score: float) -> list[Any]:
        """The settings of all trials of a search whose scores are `score`, or fall from it."""

    def syntheses(self, bug: Bug) -> Iterable[tuple[str, Callable[[Any], Any], Any, Any, bool]]:
        """For each pair of tables: name, a synthesis, the two tables, and whether they are
        strangers rather than neighbours.
        """

    def synthetic_squares(self, bug: Bug) -> tuple[float, float]:
        """The sum of squares of all measurements of a synthesis, and what is claimed."""

    def pictures(self, bug: Bug) -> Iterable[tuple[str, Callable[[Any], Any], Any, Any, bool]]:
        """For each pair of sets of pictures: name, a synthesis of images, the two sets, and whether
        they are strangers.
        """

    def picture_squares(self, bug: Bug) -> tuple[float, float]:
        """The sum of squares of all sums of a synthesis of images, and what is claimed."""

    def evolutions(self, bug: Bug) -> Iterable[tuple[str, Callable[[Any], Any], Any, Any, bool]]:
        """For each pair of sets of records: name, an evolution, the two sets, and whether they are
        strangers.
        """

    def evolution_squares(self, bug: Bug) -> tuple[float, float]:
        """The sum of squares of all rounds of an evolution, and what is claimed."""
