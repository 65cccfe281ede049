"""What every release leaves: a run folder with its privacy report. The results of all families are
this, with what they released beside it.

A finished run of any kind: read it again, predict with it, sign it. What a kind is read by, its
family registers in `dpfy/entry_points.txt`, under the kind of the run's first claim.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpfy.core import plugins, storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.report import card, signature
from dpfy.report.verify import verify
from dpfy.runs.folder import CARD, LEDGER, held_claims

if TYPE_CHECKING:
    from dpfy.core.guarantee import Guarantee
    from dpfy.report.signature import Signed
    from dpfy.report.verify import Finding


@dataclass(frozen=True, repr=False)
class Released:
    """A finished run: its folder, and its privacy report.

        answers.run, answers.guarantee, answers.epsilon, answers.report, answers.verify()

    Args:
        run: The run folder.

    Guarantees: nothing here is private: what a result shows is what its run published.

    Example:
        >>> import dpfy
        >>> ages = {"age": [30, 41, 58]}
        >>> answers = dpfy.query(ages, "sum(age)", epsilon=1.0, delta=0, schema=[
        ...     dpfy.Number("age", 0, 100)
        ... ])
        >>> answers.epsilon <= 1.0, all(finding.holds for finding in answers.verify())
        (True, True)
    """

    run: Path

    @classmethod
    def read(cls, run: str | Path, **parts: Any) -> Self:
        """The result of a finished run, with what the family released.

        Raises:
            InvalidInput: The folder holds no finished run.
        """
        made = cls(Path(run), **parts)
        _ = made.report
        return made

    @cached_property
    def report(self) -> dict[str, Any]:
        """The privacy report (privacy.json), as it was published."""
        return report_of(self.run)

    @property
    def epsilon(self) -> float:
        """What the whole run costs at `delta`: an upper bound."""
        return _number(self.report["guarantee"]["epsilon"])

    @property
    def delta(self) -> float:
        """The delta at which `epsilon` holds."""
        return float(self.report["guarantee"]["delta"])

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything that the run's ledger holds: a curve with all that belongs
        to it. ``guarantee.epsilon(delta)`` asks it at another delta.
        """
        from dpfy import accounting

        stated = self.report["guarantee"]
        return self._ledger().guarantee(
            accounting.accountant(stated["accountant"]),
            tuple(self.report["caveats"]),
            self.report["setting"]["model"],
        )

    @property
    def statement(self) -> str:
        """The guarantee in one sentence."""
        return str(self.report["statement"])

    def verify(self, **options: Any) -> list[Finding]:
        """Check the run as ``dpfy.verify(result.run)`` does."""
        from dpfy.report.verify import verify

        return verify(self.run, **options)

    def to_json(self) -> dict[str, Any]:
        """What was released and what it costs, as JSON."""
        stated = self.report["guarantee"]
        return {
            "run": str(self.run),
            **self._told(),
            **{key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")},
            "statement": self.statement,
        }

    def _told(self) -> dict[str, Any]:
        """What the family adds to `to_json`."""
        return {}

    def _ledger(self) -> Ledger:
        return Ledger.read(self.run / LEDGER)

    def _shown(self) -> str:
        """What was released, as text; the table of a query, say."""
        told = {k: v for k, v in self._told().items() if isinstance(v, str | int | float)}
        return "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in told.items())

    def _shown_html(self) -> str:
        return f"<pre>{html.escape(self._shown())}</pre>" if self._shown() else ""

    def _where(self) -> str:
        return f"Run: {self.run}"

    def __str__(self) -> str:
        return "\n".join(part for part in (self._shown(), self.statement, self._where()) if part)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        below = html.escape(f"{self.statement} {self._where()}")
        return f"{self._shown_html()}<p>{below}</p>"


def report_of(run: str | Path) -> dict[str, Any]:
    """The privacy report of a finished run."""
    if not isinstance(run, str | Path):
        rule = "must be the folder of a finished run, as a path"
        raise InvalidInput("run", type(run).__name__, rule)
    if not (Path(run) / card.NAME).is_file():
        there = (Path(run) / LEDGER).is_file()
        rule = "is unfinished: resume it first" if there else "holds no finished dpfy run"
        raise InvalidInput("run", str(run), rule)
    found: dict[str, Any] = storage.parsed_json(
        card.NAME, storage.content(card.NAME, Path(run) / card.NAME)
    )
    return found


def _number(value: float | str) -> float:
    """A number of a report, where infinity is a word."""
    return float(value)


LOADERS, PREDICTORS = "dpfy.loaders", "dpfy.predictors"
NETWORK = "training"
"""The kind whose loader says what is wrong with a folder that is no finished run."""


def kind_of_run(run: str | Path) -> str:
    """The kind of a run: that of its first claim."""
    if not isinstance(run, str | Path) or not (Path(run) / CARD).is_file():
        return NETWORK
    if not (Path(run) / LEDGER).is_file():
        return NETWORK
    claims = held_claims(Path(run))
    return claims[0].kind if claims else NETWORK


def load(run: str | Path, model: Any = None) -> Any:
    """What a finished run released.

        net = dpfy.load("runs/x", net)

    Args:
        run: The run folder.
        model: For a network, the module to put the weights into; a compiled or parallel one is
            filled inside, an adapter (peft) goes onto the base that it was trained on. Without it
            the model is made from the configuration of a run of ``dpfy train``.

    Returns:
        A network, in evaluation mode where it was made here; a fitted estimator; a student; the
        answers of a query; the result of a synthesis.

    Raises:
        InvalidInput: There is no finished run in the folder.
        Corrupt: A file is not the one that report and ledger name.

    Guarantees: weights are those whose hash report and ledger state (averaged, where the run
    averaged), and a refused model is left as it was. Whatever is done with them, without the data,
    costs nothing.

    Example:
        >>> import dpfy
        >>> answers = dpfy.query(
        ...     {"age": [30, 41]}, "sum(age)", epsilon=1.0, delta=0, run="runs/ages",
        ...     schema=[dpfy.Number("age", 0, 100)],
        ... )
        >>> dpfy.load("runs/ages").epsilon == answers.epsilon
        True
    """
    kind = kind_of_run(run)
    if model is not None:
        network = kind if kind.startswith("label-") else NETWORK
        return plugins.find(LOADERS, network)(run, model)
    loader = plugins.find(LOADERS, kind)
    return Released.read(run) if loader is None else loader(run)


def predict(run: str | Path, data: Any, model: Any = None) -> Any:
    """What a released model says about public rows.

        dpfy.predict("runs/x", "rows.csv").predicted()

    Args:
        run: The finished run of a network, an estimator, a student or a search.
        data: The rows: a CSV or Parquet file, or what the family reads; the label may be missing.
        model: The module, for a network that a program made.

    Returns:
        The predictions: `predicted()`, `probabilities`, `to_json()`, `to_csv()`.

    Raises:
        InvalidInput: The run has no model, or the rows do not fit it.
        Corrupt: A file is not the one that report and ledger name.

    Guarantees: the model's hash is checked; rows are encoded as those it was trained on; nothing of
    the run is changed. It costs nothing.

    Example:
        >>> import numpy as np
        >>> import dpfy
        >>> from dpfy.estimators import LogisticRegression
        >>> X = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> model = LogisticRegression(bounds=(-1, 1), classes=[0, 1], run="runs/signs").fit(X, y)
        >>> len(dpfy.predict("runs/signs", X[:3]).predicted())
        3
    """
    kind = kind_of_run(run)
    predictor = plugins.find(PREDICTORS, kind)
    if predictor is None:
        way_out = "give a run that released a model; dpfy.load(run) reads this one"
        raise Unsupported(f"predicting with a run of kind {kind!r}", way_out)
    return predictor(run, data) if model is None else predictor(run, data, model)


def sign(run: str | Path, *, key: str | Path) -> Signed:
    """Sign a finished run: the head of its ledger and the hash of its report, in signature.json.

        dpfy.sign("runs/x", key="me.pem")

    Args:
        run: The run folder. It is verified first.
        key: Your private key; ``dpfy sign --new-key me.pem`` makes one.

    Raises:
        Corrupt: The run does not verify, and was not signed.

    Returns:
        What was signed: the key's fingerprint, the head of the ledger and the hash of the report.

    Example:
        >>> from pathlib import Path
        >>> import dpfy
        >>> from dpfy.report.signature import new_key
        >>> answers = dpfy.query(
        ...     {"age": [30, 41]}, "sum(age)", epsilon=1.0, delta=0, run="runs/ages",
        ...     schema=[dpfy.Number("age", 0, 100)],
        ... )
        >>> _ = new_key(Path("me.pem"))
        >>> signed = dpfy.sign("runs/ages", key="me.pem")
        >>> all(finding.holds for finding in dpfy.verify("runs/ages"))
        True
    """
    failed = [f for f in verify(run) if not f.holds and f.what != signature.CHECK]
    if failed:
        problem = f"is not signed: it does not verify ({failed[0].what}: {failed[0].detail})"
        raise Corrupt(Path(run).name, problem)
    return signature.sign_run(Path(run), Path(key))
