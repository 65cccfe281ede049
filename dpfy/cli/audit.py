"""`dpfy audit`: measure from outside what the code leaks. Exit status 1 if a claim is exceeded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dpfy.cli import options
from dpfy.cli.form import AskedJob, JobForm, flag, job
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import require_writable, save, tell
from dpfy.cli.plugins import group
from dpfy.core.errors import InvalidInput, Unsupported

app = group(
    """Attack our own guarantee: lower bounds on epsilon, measured from outside, beside what was
    claimed. Exit status 1: a claim is exceeded.

    Example: dpfy audit mechanism --noise-multiplier 1 --steps 16""",
    short="Attack our own guarantee: lower bounds on epsilon.",
    default="run",
    name="audit",
)

Confidence = Annotated[float, typer.Option(help="Of the lower bound.")]
Plot = Annotated[
    Path | None, typer.Option(help="Write the attacker's ROC against the claim here (SVG).")
]

Members = Annotated[
    str | None,
    typer.Option(help="File of records that were trained on. Left out for a public data set."),
]
Others = Annotated[str | None, typer.Option(help="File of records that were not trained on.")]
Random = Annotated[
    bool,
    typer.Option("--random", help="Each record was made a member by a fair coin: certify a bound."),
]
CLASSIFIERS = ("training", "tuning", "public-tuning")
"""Kinds of runs whose model is attacked by membership inference."""
MOST_SHADOWS = 64
NOT_TRIED = (
    "canaries planted before the training, seen at every step (dpfy audit train); worst-case "
    "initial weights; more shadow models than fit in --minutes"
)
AUDIT_TRAIN = "audit its mechanism: dpfy audit mechanism, or dpfy audit train for a classifier"
NO_ATTACK = {
    "query": "its answers are sums with noise: dpfy audit mechanism attacks that noise",
    "synthesis": "dpfy synthesize evaluate scores a membership attack on rows of your own",
    "answers": "its votes have noise: dpfy audit mechanism attacks that noise",
    "student": "its votes have noise: dpfy audit mechanism attacks that noise",
    "label-sums": "no answer is about a single label; dpfy audit labels attacks those that are",
}


@app.command("mechanism")
def mechanism(
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise in units of the sensitivity.")
    ] = 1.0,
    sampling_rate: Annotated[
        float, typer.Option(help="Poisson rate; needs independent noise.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(help="Noisy steps.")] = 16,
    epochs: Annotated[
        int, typer.Option(help="Participations of a unit, for correlated noise.")
    ] = 1,
    bands: Annotated[
        int,
        typer.Option(
            help="Bands of correlated noise (square-root coefficients); 1 is independent noise."
        ),
    ] = 1,
    delta: Annotated[float, typer.Option(help="The delta of the claim.")] = 1e-5,
    canaries: Annotated[
        int, typer.Option(help="Independent coordinates, each in by a fair coin.")
    ] = 10_000,
    confidence: Confidence = 0.95,
    insecure_seed: options.Seed = None,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Audit the noise stream by itself on neighbouring inputs.

    The claim is what the accountant gives for this noise, rate and number of steps; the attacker
    sees every release. The noise alone is tested too, for its scale and shape, and the answer says
    which error of scale the test would have found.

    Example: dpfy audit mechanism --noise-multiplier 1 --sampling-rate 0.1 --steps 32
    """
    from dpfy.audit import finished
    from dpfy.audit.observation import StreamFacts, audited

    _check(confidence, plot, canaries)
    facts = StreamFacts(noise_multiplier, sampling_rate, steps, epochs, bands, delta)
    found = audited(facts, canaries, insecure_seed)
    verdict, others, seen, family, shape = finished.of_stream(found, confidence)
    answer = finished.record(verdict, others, seen, family) | {"noise": shape}
    _end(answer, as_json, plot, (seen, family))


@app.command("users")
def users(
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise in units of the clip norm of a user.")
    ] = 1.0,
    sampling_rate: Annotated[float, typer.Option(help="Chance that a user is in a round.")] = 0.2,
    steps: Annotated[int, typer.Option(help="Noisy rounds.")] = 20,
    ordinary: Annotated[int, typer.Option("--users", help="Ordinary users.")] = 500,
    canaries: Annotated[int, typer.Option(help="Canary users, each in by a fair coin.")] = 200,
    records: Annotated[int, typer.Option(help="Records of each user.")] = 3,
    rounds: Annotated[
        bool,
        typer.Option(
            "--rounds", help="Clients that send updates to a server, not users in one loop."
        ),
    ] = False,
    delta: Annotated[float, typer.Option(help="The delta of the claim.")] = 1e-5,
    confidence: Confidence = 0.95,
    insecure_seed: options.Seed = None,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Audit user-level training, or the rounds of a federation, in one run with canary users.

    The claim is what the accountant gives for one user. The attacker sees every noisy sum; a second
    figure is the estimate from the cosines of canary updates with the movement of the model (Andrew
    et al. 2023), which is no bound.

    Example: dpfy audit users --noise-multiplier 1 --canaries 100 --steps 8
    """
    from dpfy.audit import finished
    from dpfy.audit.families import ClaimedFamily
    from dpfy.audit.observation import claimed_curve
    from dpfy.audit.user_training import UserFacts, audited_users, by_records
    from dpfy.audit.whitebox import AuditedClaim, ObservedSums
    from dpfy.federated.audit import observe_rounds
    from dpfy.federated.recipes import CLIENT

    _check(confidence, plot, canaries)
    facts = UserFacts(
        noise_multiplier, ordinary, canaries, 1 if rounds else records, sampling_rate, steps, delta
    )
    seen = audited_users(
        facts,
        observe_rounds if rounds else by_records(records),
        insecure_seed,
        CLIENT if rounds else None,
    )
    family = ClaimedFamily(claimed_curve(seen.plan))
    claim = AuditedClaim(seen.plan.epsilon, delta, noise_multiplier, sampling_rate, family)
    verdict, others, scores = finished.by_updates(
        ObservedSums(seen.projections, seen.included), claim, confidence
    )
    answer = finished.record(verdict, others, scores, family) | finished.of_people(
        seen, claim, confidence
    )
    _end(answer | {"unit": seen.plan.recipe.unit.name}, as_json, plot, (scores, family))


@dataclass(frozen=True)
class AuditTrainForm(JobForm):
    """`dpfy audit train`."""

    canaries: int | None = flag(
        "Synthetic canaries, each in by a fair coin.", None, "1000", key="audit.canaries"
    )
    attack: str | None = flag(
        "white-box (sees every update) or final-model (sees the released model).",
        None,
        "white-box",
        key="audit.attack",
    )
    batch_size: float | None = flag("Mean size of a batch.", None, key="training.batch_size")
    steps: int | None = flag("Noisy steps.", None, key="training.steps")
    confidence: float = flag("Of the lower bound.", 0.95)
    plot: str | None = flag("Write the attacker's ROC against the claim here (SVG).", None)


@app.command("train")
@job(AuditTrainForm)
def train(asked: AskedJob[AuditTrainForm]) -> None:
    """Train a configuration with canaries in it, then audit the run. It is a training like any
    other, and charged like any other.

    Example: dpfy audit train embedded --model linear --steps 12 --canaries 300 --out runs/audited
    """
    from dpfy.audit import job as audit_job

    plot = None if asked.form.plot is None else Path(asked.form.plot)
    _check(asked.form.confidence, plot)
    given, folder = asked.fields(audit_job.AUDITED), asked.folder()
    with resumable(folder, "dpfy audit train"):
        if asked.resume:
            if others := [*(["config"] if asked.config is not None else []), *given]:
                rule = "a resumed run has its own configuration: give --out alone"
                raise InvalidInput("--resume", others[0], rule)
            audit_job.resume(folder, progress=not asked.as_json)
        else:
            whole = audit_job.read(asked.config, given)
            if asked.show:
                asked.tell(whole)
                return
            audit_job.train(whole, folder, seed=asked.seed, progress=not asked.as_json)
    _run(folder, asked.form.confidence, plot, asked.as_json)


@app.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="A finished run.")],
    members: Members = None,
    others: Others = None,
    random: Random = False,
    minutes: Annotated[
        float, typer.Option(help="Time for shadow models, where the attack trains some.")
    ] = 2.0,
    confidence: Confidence = 0.95,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Audit a finished run with the strongest attack that fits it and the time. The word run may be
    left out.

    A run with canaries (dpfy audit train) is audited by them, and keeps audit.json and audit.svg. A
    classifier is attacked by membership inference with shadow models, answers for single labels by
    guessing the labels. Other runs have no attack, and one line says so.

    Example: dpfy audit runs/x --minutes 5
    """
    from dpfy.core import check
    from dpfy.runs.mark import CANARIES
    from dpfy.runs.released import kind_of_run, report_of

    check.positive("--minutes", minutes)
    if (folder / CANARIES).is_file():
        _run(folder, confidence, plot, as_json)
        return
    if not folder.exists():
        rule = "is neither a command nor the folder of a run; dpfy audit --help lists commands"
        raise InvalidInput("audit", str(folder), rule)
    report_of(folder)
    kind = kind_of_run(folder)
    if kind == "label-responses":
        _labels_of(folder, confidence, as_json)
    if kind not in CLASSIFIERS:
        raise Unsupported(f"an attack on a run of kind {kind!r}", NO_ATTACK.get(kind, AUDIT_TRAIN))
    if plot is not None:
        raise InvalidInput("--plot", str(plot), "is for runs with canaries")
    _membership(
        folder, (members, others), shadows=MOST_SHADOWS, seconds=60 * minutes, random=random,
        confidence=confidence, out=None, as_json=as_json, not_tried=NOT_TRIED,
    )  # fmt: skip


def _run(folder: Path, confidence: float, plot: Path | None, as_json: bool) -> None:
    from dpfy.audit import job as audit_job

    _check(confidence, plot)
    answer, scores, family = audit_job.audited_run(folder, confidence)
    _end(answer, as_json, plot, (scores, family))


@app.command("model")
def model(
    folder: Annotated[Path, typer.Argument(help="A finished run of dpfy train.")],
    members: Members = None,
    others: Others = None,
    shadows: Annotated[
        int, typer.Option(help="Shadow models to train, an even number: stronger attacks.")
    ] = 0,
    random: Random = False,
    confidence: Confidence = 0.95,
    out: Annotated[
        Path | None, typer.Option(help="Write the result as JSON to this new file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Infer membership: how well does the model tell its training records from others?

    Threshold and quantile attacks need the model alone; with --shadows also likelihood-ratio
    attacks. No budget is spent, and nothing is released: the figures are computed from the records
    without noise.

    Example: dpfy audit model runs/x --shadows 16
    """
    _membership(
        folder, (members, others), shadows=shadows, seconds=math.inf, random=random,
        confidence=confidence, out=out, as_json=as_json, not_tried="",
    )  # fmt: skip


def _membership(
    folder: Path,
    files: tuple[str | None, str | None],
    *,
    shadows: int,
    seconds: float,
    random: bool,
    confidence: float,
    out: Path | None,
    as_json: bool,
    not_tried: str,
) -> None:
    from rich.console import Console

    from dpfy.audit.shadows import KEEP, AttackedRun

    _check(confidence, None)
    if out is not None:
        require_writable("--out", out, {".json": (b"{",)})
    attacked = AttackedRun(folder, *files)
    with Console(stderr=True).status("records") as shown:
        found = attacked.attack(
            shadows,
            seconds=seconds,
            random=random,
            confidence=confidence,
            progress=lambda what, share=None: shown.update(what),
        )
    answer = found.to_json() | {"run": str(folder), "may_be_published": attacked.public}
    said = [*found.sentences(), *([] if attacked.public else [KEEP])]
    if not_tried:
        answer, said = answer | {"not_tried": not_tried}, [*said, f"not tried: {not_tried}"]
    if out is not None:
        save("--out", out, (json.dumps(answer, indent=1, allow_nan=False) + "\n").encode())
    tell(answer, said, as_json=as_json)
    raise typer.Exit(1 if found.violated else 0)


@app.command("labels")
def labels(
    method: Annotated[str, typer.Option(help="rr, lp-mst or alibi.")] = "rr",
    epsilon: Annotated[float, typer.Option(help="What is claimed for one label.")] = 1.0,
    canaries: Annotated[
        int, typer.Option(help="Labels that are drawn by coins and guessed.")
    ] = 20_000,
    confidence: Confidence = 0.95,
    as_json: options.Json = False,
) -> None:
    """Attack a release of labels: how well do its answers tell which of two labels a record has? No
    data is read: labels are coins.

    Example: dpfy audit labels --method rr --epsilon 1
    """
    from dpfy.labels.method import LabelMethod

    _check(confidence, None, canaries)
    _infer_labels(LabelMethod.of(method), epsilon, canaries, confidence, as_json)


def _labels_of(folder: Path, confidence: float, as_json: bool) -> NoReturn:
    """The same for the method of a finished run."""
    from dpfy.labels.method import LabelMethod
    from dpfy.runs.folder import held_claims

    claim = held_claims(folder)[0]
    method, epsilon = getattr(claim, "method", ""), getattr(claim, "epsilon", None)
    if method not in ("rr", "lp-mst", "alibi") or epsilon is None:
        raise Unsupported(f"an attack on labels released by {method!r}", AUDIT_TRAIN)
    _check(confidence, None)
    _infer_labels(LabelMethod.of(method), epsilon, 20_000, confidence, as_json)


def _infer_labels(
    method: Any, epsilon: float, canaries: int, confidence: float, as_json: bool
) -> NoReturn:
    from dpfy.audit import one_run as audited
    from dpfy.labels.audit import inferred

    scores, coins = inferred(method, epsilon, canaries, seed=1)
    verdict = audited.inference(scores, coins, epsilon=epsilon, confidence=confidence)
    advantage = f"label-inference advantage: {verdict.bound.detail['advantage']:.3f}"
    tell(
        verdict.to_json(),
        [verdict.sentence, advantage, f"does not show: {audited.DOES_NOT_SHOW}."],
        as_json=as_json,
    )
    raise typer.Exit(1 if verdict.violated else 0)


def _check(confidence: float, plot: Path | None, canaries: int | None = None) -> None:
    """Refuse before the work what would fail after it."""
    from dpfy.core import check

    if not 0.5 <= check.inside_unit("--confidence", confidence) <= 1 - 1e-9:
        rule = (
            "must lie between 0.5 and 1 - 1e-9: a bound that is wrong more often than right says "
            "nothing"
        )
        raise InvalidInput("--confidence", confidence, rule)
    if canaries is not None:
        from dpfy.audit.job import MOST_CANARIES

        check.integer("--canaries", canaries, least=10, most=MOST_CANARIES)
    if plot is not None:
        require_writable("--plot", plot, {".svg": (b"<?xml",)})


def _end(answer: dict[str, Any], as_json: bool, plot: Path | None, picture: Any) -> None:
    if plot is not None:
        from dpfy.audit.finished import roc_svg

        scores, family = picture
        save(
            "--plot",
            plot,
            roc_svg(
                scores, family.tradeoff(family.claim), "attacker against the claimed trade-off"
            ),
        )
        answer = answer | {"plot": str(plot)}
    others = [
        f"  also: epsilon at least {other['epsilon_lower']:.3f} ({other['method']})"
        for other in answer["others"]
    ]
    others += [f"  {line}" for line in answer.get("people", [])]
    limits = [f"shows: {answer['shows']}.", f"does not show: {answer['does_not_show']}."]
    tell(answer, [answer["sentence"], *others, *limits], as_json=as_json)
    raise typer.Exit(1 if answer["violated"] else 0)
