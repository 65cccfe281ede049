"""`dpfy serve student`: a model that learns from paid answers of private teachers, and is
released.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.interrupt import resumable
from dpfy.cli.output import tell

GRAPH = "graph"


def student(
    data: Annotated[
        str,
        typer.Argument(
            help="Private records: embedded, digits, mnist, fashion-mnist or an NPZ file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New run folder.", show_default=False)],
    epsilon: Annotated[float, typer.Option(help="What all answers together may cost.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Delta of the guarantee.")] = 1e-5,
    teachers: Annotated[
        int, typer.Option(help="How many; each knows its own part of the private records.")
    ] = 1000,
    answers: Annotated[int, typer.Option(help="Most public inputs that are answered.")] = 1000,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Ask whether the teachers agree first, this often at most.", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="The part of the teachers that must agree (with --queries).")
    ] = 0.6,
    public: Annotated[
        str | None, typer.Option(help="File of public inputs (NPZ, IDX).", show_default=False)
    ] = None,
    provenance: Annotated[
        str | None,
        typer.Option(
            help="Where they are from, and why they are public, for the card.", show_default=False
        ),
    ] = None,
    public_records: Annotated[
        int | None,
        typer.Option(
            help="Instead: so many held-out records of a public data set.",
            show_default="nine tenths of them",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="The teachers: graph, or networks: lenet5, tanh-cnn, mlp, linear.")
    ] = GRAPH,
    steps: Annotated[
        int | None, typer.Option(help="Steps of SGD of every network.", show_default="240")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Records of a step.", show_default="20")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of a network.", show_default="0.1")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where networks are trained: cpu, cuda.", show_default="cpu")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes (NPZ).", show_default=False)
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(help="Column with the person that a row belongs to.", show_default=False),
    ] = None,
    at_most: Annotated[
        int | None,
        typer.Option(help="Most records of a person that other releases use.", show_default=False),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(help="Folder with mnist/, ... (else $DPFY_DATA).", show_default=False),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of the data set, over all its releases.", show_default=False),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run that was stopped, with the same words."),
    ] = False,
    insecure_seed: Annotated[
        int | None,
        typer.Option(help="Fix all randomness, for tests: protects nothing.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train and release a student of private teachers (PATE).

    Private records are dealt to teachers; their noisy votes on public inputs, billed before the
    first record is read, are what is released. The student learns from these answers and from
    public inputs alone. It comes with its card; check it with dpfy verify.

    Example: dpfy serve student mnist --epsilon 1 --delta 1e-5 --out runs/student
    """
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.prediction import pate, student_job, teaching
    from dpfy.runs.folder import ended
    from dpfy.runs.mark import Mark
    from dpfy.runs.run import Run

    if resume and Mark.find(out) is None and not ended(out):
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )
    said = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "device": device,
    }
    given = {name: value for name, value in said.items() if value is not None}
    check.one_of("--model", model, (GRAPH, *teaching.NETWORK_MODELS))
    if model == GRAPH and given:
        raise InvalidInput(
            "--" + next(iter(given)).replace("_", "-"),
            next(iter(given.values())),
            "goes with a network (--model)",
        )
    means = pate.GraphTeachers() if model == GRAPH else teaching.network_training(model, given)
    assert means is not None
    config = teaching.settings(data, None, classes, data_dir, person, at_most)
    count = student_job.claim_classes(config)
    claim = pate.student_claim(
        epsilon,
        delta,
        teachers=teachers,
        classes=count,
        answers=answers,
        queries=queries,
        threshold=threshold,
        unit=config.unit,
    )
    about = {"model": "a student of private teachers", "data": config.kind}

    def place(declared: dict[str, str]) -> Run:
        return Run(out, resume, ledger, seed=insecure_seed, public_data=(declared,), about=about)

    words: dict[str, object] = {
        "epsilon": epsilon,
        "delta": delta,
        "teachers": teachers,
        "answers": answers,
        "queries": queries,
    }
    words |= {
        "threshold": threshold,
        "public": public,
        "provenance": provenance,
        "public-records": public_records,
        "model": model,
    }
    words |= said | {
        "classes": classes,
        "person": person,
        "at-most": at_most,
        "data-dir": data_dir,
        "ledger": ledger,
        "insecure-seed": insecure_seed,
    }
    with resumable(out, _again(data, words)):
        made = student_job.run(
            place,
            claim,
            config,
            student_job.PublicInputs(public, provenance, public_records),
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
    lines = [*shown, made.statement, f"check it: dpfy verify {out}"]
    tell({"run": str(out)} | stated | told | {"statement": made.statement}, lines, as_json=as_json)


def _again(data: str, words: dict[str, object]) -> str:
    """The same command, to be said again."""
    given = [
        word
        for name, value in words.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["dpfy", "serve", "student", data, *given])
