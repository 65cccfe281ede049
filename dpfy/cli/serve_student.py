"""`dpfy serve student`: a model that learns from paid answers of private teachers, and is
released.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpfy.cli.form import RULE, Asked, RunForm, command, flag
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import tell

GRAPH = "graph"
NETWORK = ("steps", "batch_size", "learning_rate", "device")


@dataclass(frozen=True)
class StudentForm(RunForm):
    """`dpfy serve student`."""

    data: str = flag(
        "Private records: digits, mnist, ... or an NPZ file; with --target a table.",
        metavar="DATA",
        placed=True,
        path=True,
    )
    epsilon: float = flag("What all answers together may cost.", 1.0)
    delta: float | None = flag("Delta of the guarantee.", None, RULE)
    teachers: int = flag("How many; each knows its own part of the private records.", 1000)
    answers: int = flag("Most public inputs that are answered.", 1000)
    queries: int | None = flag("Ask whether the teachers agree first, this often at most.", None)
    threshold: float = flag("The part of the teachers that must agree (with --queries).", 0.6)
    public: str | None = flag("File of public inputs (NPZ, IDX).", None, path=True)
    provenance: str | None = flag("Where they are from, and why they are public.", None)
    public_records: int | None = flag(
        "Instead: held-out records of a public data set.", None, "nine tenths"
    )
    model: str = flag("The teachers: graph, or networks: lenet5, tanh-cnn, mlp, linear.", GRAPH)
    steps: int | None = flag("Steps of SGD of every network.", None, "240")
    batch_size: int | None = flag("Records of a step.", None, "20")
    learning_rate: float | None = flag("Of a network.", None, "0.1")
    device: str | None = flag("Where networks are trained: cpu, cuda.", None, "cpu")
    schema: str | None = flag("Public schema of a table (with --target).", None, path=True)
    target: str | None = flag("Column of numbers: the student predicts it.", None)
    classes: int | None = flag("Number of classes (NPZ).", None)
    person: str | None = flag("Column with the person that a row belongs to.", None)
    at_most: int | None = flag("Most records of a person that other releases use.", None)
    data_dir: str | None = flag("Folder with mnist/, ... (else $DPFY_DATA).", None, path=True)


@command(StudentForm)
def student(asked: Asked[StudentForm]) -> None:
    """Train and release a student of private teachers (PATE).

    Private records are dealt to teachers, whose noisy votes on public inputs are released. The
    student learns from these answers alone. With --target it predicts a number of a table.

    Example: dpfy serve student digits --teachers 100 --answers 50 --epsilon 8 --out runs/student
    """
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.prediction import pate, student_job, voters

    form = asked.form
    if form.target is not None:
        _numbers(asked)
        return
    if form.schema is not None:
        raise InvalidInput("--schema", form.schema, "goes with --target")
    said = {name: getattr(form, name) for name in NETWORK}
    given = {name: value for name, value in said.items() if value is not None}
    check.one_of("--model", form.model, (GRAPH, *voters.NETWORK_MODELS))
    if form.model == GRAPH and given:
        name, value = next(iter(given.items()))
        rule = "goes with a network (--model)"
        raise InvalidInput(f"--{name.replace('_', '-')}", value, rule)
    means = (
        pate.GraphTeachers() if form.model == GRAPH else voters.network_training(form.model, given)
    )
    assert means is not None
    config = voters.settings(
        form.data, None, form.classes, form.data_dir, form.person, form.at_most
    )
    claim = pate.student_claim(
        form.epsilon,
        asked.delta(),
        teachers=form.teachers,
        classes=student_job.claim_classes(config),
        answers=form.answers,
        queries=form.queries,
        threshold=form.threshold,
        unit=config.unit,
    )
    about = {"model": "a student of private teachers", "data": config.kind}
    public = student_job.PublicInputs(form.public, form.provenance, form.public_records)
    with resumable(asked.out, asked.again("serve", "student")):
        made = student_job.run(
            lambda declared: asked.run(public_data=(declared,), about=about),
            claim,
            config,
            public,
            means,
        )
    section = next(dict(part) for part in made.report["sections"] if part["name"] == claim.name)
    told = {
        key: section[key]
        for key in ("answered", "public_inputs", "test_accuracy", "tested_on")
        if key in section
    }
    stated = {key: made.report["guarantee"][key] for key in ("epsilon", "delta")}
    shown = (
        [f"accuracy on {told['tested_on']}: {told['test_accuracy']:.2%}"]
        if "test_accuracy" in told
        else []
    )
    lines = [*shown, made.statement, f"check it: dpfy verify {asked.out}"]
    told = {"run": str(asked.out)} | stated | told | {"statement": made.statement}
    tell(told, lines, as_json=asked.as_json)


OF_CLASSES = {
    "queries": None,
    "public_records": None,
    "model": GRAPH,
    "classes": None,
} | dict.fromkeys(NETWORK)


def _numbers(asked: Asked[StudentForm]) -> None:
    """A student that predicts a number."""
    from dpfy.core.errors import InvalidInput
    from dpfy.prediction import regression, student_job

    form = asked.form
    assert form.target is not None
    for name, default in OF_CLASSES.items():
        if getattr(form, name) != default:
            raise InvalidInput(
                f"--{name.replace('_', '-')}", getattr(form, name), "goes with classes"
            )
    if form.public is None or form.provenance is None:
        rule = "must both be given: rows without targets, and why they are public"
        raise InvalidInput("--public, --provenance", (form.public, form.provenance), rule)
    data = regression.dataset(form.data, form.schema, form.person, form.at_most)
    low, high = regression.target_of(data.schema, form.target).range
    claim = regression.number_claim(
        form.epsilon,
        asked.delta(),
        teachers=form.teachers,
        low=low,
        high=high,
        answers=form.answers,
        unit=data.privacy_unit,
    )
    declared = {
        "data": Path(form.public).name,
        "used_for": student_job.USED_FOR,
        "provenance": form.provenance,
    }
    about = {"model": "a student of private teachers", "data": "a table"}
    with resumable(asked.out, asked.again("serve", "student")):
        place = asked.run(public_data=(declared,), about=about)
        made = regression.run(place, claim, data, form.target, form.public)
    stated = {key: made.report["guarantee"][key] for key in ("epsilon", "delta")}
    told = {"run": str(asked.out), "statement": made.statement, "answered": len(made.answers)}
    lines = [made.statement, f"check it: dpfy verify {asked.out}"]
    tell(told | stated, lines, as_json=asked.as_json)
