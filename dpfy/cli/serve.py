"""`dpfy serve`: answers from models that are never released, and students that learn from them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.form import RULE, Asked, RunForm, command, flag
from dpfy.cli.output import charged, one_line, tell
from dpfy.cli.plugins import group
from dpfy.cli.serve_student import student

app = group(
    """Answer questions from private data, as many as were paid for. Teach makes many small models,
    each of a part of the data. Start answers by their noisy vote. Student trains a model on such
    answers about public inputs, and releases it (PATE).

    Example: dpfy serve teach digits --voters 100 --out voters""",
    short="Answer questions from private data, as many as were paid for.",
)
app.command("student")(student)


@app.command("teach")
def teach(
    data: Annotated[
        str,
        typer.Argument(
            help="embedded, digits, mnist, ... or a file: CSV or Parquet (with --schema), NPZ."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="New folder for the voters. It is as private as the data.", show_default=False
        ),
    ],
    voters: Annotated[
        int, typer.Option(help="How many; each knows its own part of the data.")
    ] = 250,
    schema: Annotated[
        str | None, typer.Option(help="Public schema of the columns (TOML).", show_default=False)
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(help="Column with the person that a row belongs to.", show_default=False),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="Most rows of one person that are used.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Column of numbers: voters say numbers.", show_default=False),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes (NPZ).", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option(help="class-means, or a network: lenet5, tanh-cnn, mlp, linear.")
    ] = "class-means",
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
    shrink: Annotated[
        float, typer.Option(help="Records at 0 that every class mean has in addition.")
    ] = 1.0,
    data_dir: Annotated[
        str | None,
        typer.Option(help="Folder with mnist/, ... (else $DPFY_DATA).", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Make voters from private records: many small models, each of a part of the data that no other
    one sees.

    Nothing is released, so nothing is charged: keep the folder as you keep the data. dpfy serve
    start answers from it. Networks are trained side by side, as one batched model; all take the
    same number of steps.

    Example: dpfy serve teach digits --voters 100 --out voters

    Example: dpfy serve teach mnist --model lenet5 --steps 240 --out voters

    Example: dpfy serve teach people.csv --schema people.toml --target age --out voters
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.prediction.voters import network_training, settings, taught

    if out.exists():
        raise InvalidInput("--out", str(out), "is there already; choose another folder")
    if target is not None:
        from dpfy.prediction import regression

        given = regression.dataset(data, schema, person, at_most)
        made, told = regression.taught_numbers(given, target, voters)
        made.save(out, **told)
        facts = {"voters": voters, "low": made.low, "high": made.high, "out": str(out)}
        words = f"{voters} voters of numbers from {made.low:g} to {made.high:g}: {out}"
        tell(facts | {"features": made.features}, [words], as_json=as_json)
        return
    said = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "device": device,
    }
    training = network_training(
        model, {name: value for name, value in said.items() if value is not None}
    )
    found, about = taught(
        settings(data, schema, classes, data_dir, person, at_most),
        voters,
        shrink,
        training,
    )
    found.save(out, **about)
    told = {"voters": voters, "classes": found.classes, "features": found.features, "out": str(out)}
    tell(
        told,
        [f"{voters} voters of {found.features} numbers and {found.classes} classes: {out}"],
        as_json=as_json,
    )


@dataclass(frozen=True)
class StartForm(RunForm):
    """`dpfy serve start`."""

    voters: str = flag(
        "The folder that dpfy serve teach made.", metavar="VOTERS", placed=True, path=True
    )
    answers: int | None = flag("Most questions that are answered.", None)
    epsilon: float | None = flag("What all answers may cost.", None)
    delta: float | None = flag("Delta of the guarantee.", None, RULE)
    queries: int | None = flag("Ask whether the voters agree first, this often at most.", None)
    threshold: float = flag("The part of the voters that must agree (with --queries).", 0.6)
    host: str = flag("Address to listen on.", "127.0.0.1", passing=True)
    port: int = flag("Port to listen on; 0 takes a free one.", 8080, passing=True)
    token_file: str | None = flag(
        "Clients must send the token in this file.",
        None,
        "$DPFY_SERVE_TOKEN, else a new one is printed",
        passing=True,
    )
    no_token: bool | None = flag("Answer everybody who reaches the address.", None, passing=True)
    allow_host: list[str] | None = flag(  # noqa: RUF009
        "Another host name that clients use; repeat it.", None, passing=True
    )
    finish: bool | None = flag(
        "Do not serve: end the service, write its report, erase its secrets.", None, passing=True
    )


@app.command("start")
@command(StartForm, goes_on=True)
def start(asked: Asked[StartForm]) -> None:
    """Answer questions over HTTP from voters that never leave, as many as were paid for.

    Everything is reserved before the first question, and each answer is taken from that, durably,
    before its noise is drawn. A service that was stopped goes on with the same --out. A question
    that was answered before costs nothing, and neither does a refused one. Ask it: curl -H
    "Authorization: Bearer TOKEN" -H "Content-Type: application/json" -d '{"inputs": [[0, 0.5]]}'
    http://127.0.0.1:8080/predict

    Example: dpfy serve start voters --out runs/answers --answers 1000 --epsilon 2
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.core.unit import EXAMPLE, user_unit
    from dpfy.prediction import plan, service
    from dpfy.prediction.claim import AnswersClaim
    from dpfy.prediction.predictor import PrivatePredictor
    from dpfy.prediction.voters import load_voters
    from dpfy.runs.folder import LEDGER, held_claims
    from dpfy.runs.released import Released

    form, run = asked.form, asked.out
    held, about = load_voters(Path(form.voters))
    reserved = held_claims(run) if asked.resume and (run / LEDGER).is_file() else []
    if reserved:
        claim = reserved[0]
    else:
        most = about.get("most_records")
        unit = EXAMPLE if most is None else user_unit(most)
        shape: dict[str, Any] = {"voters": held.count, "classes": held.classes, "unit": unit}
        if hasattr(held, "low"):
            shape["interval"] = (held.low, held.high)
        claim = plan.service(
            form.epsilon,
            asked.delta(),
            answers=form.answers,
            queries=form.queries,
            threshold=form.threshold,
            **shape,
        )
    if not isinstance(claim, AnswersClaim):
        raise InvalidInput("--out", str(run), f"holds a run of kind {claim.kind!r}, no service")
    place = asked.run()
    if form.finish:
        with PrivatePredictor(place, claim, held) as predictor:
            folder = predictor.finish()
        spent = charged(Released.read(folder).epsilon, form.ledger)
        lines = [f"the service is over: {folder}", *spent, f"check it: dpfy verify {folder}"]
        tell({"run": str(folder)}, lines, as_json=asked.as_json)
        return
    if form.no_token and form.token_file is not None:
        rule = "gives a token that nobody is asked for; leave one of them out"
        raise InvalidInput("--no-token", "--token-file", rule)
    file = None if form.token_file is None else Path(form.token_file)
    given = None if form.no_token else service.given_token(file)
    token = given if form.no_token else given or service.new_token()
    allowed = service.Access.at(form.host, token, form.allow_host or ())
    with (
        service.listening(form.host, form.port) as listening,
        PrivatePredictor(place, claim, held) as predictor,
    ):
        labels = tuple(str(label) for label in about.get("labels") or ())
        application = service.application(predictor, labels, access=allowed)
        name = f"[{form.host}]" if ":" in form.host else form.host
        address = f"http://{name}:{listening.getsockname()[1]}"
        if form.no_token:
            _note("no token: everybody who reaches the address may ask")
        elif given is None:
            _note(f"token (shown once; clients send Authorization: Bearer TOKEN): {token}")
        told = {"address": address, "run": str(run), "left": predictor.left()}
        tell(told, f"serving on {address}", as_json=asked.as_json)
        service.serve(application, listening)
        _note(one_line(f"stopped; left: {predictor.left()}"))


def _note(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
