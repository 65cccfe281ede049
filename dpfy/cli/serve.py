"""`dpfy serve`: answers from models that are never released, and students that learn from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dpfy.cli.output import charged, one_line, tell
from dpfy.cli.plugins import VerbGroup
from dpfy.cli.serve_student import student

app = typer.Typer(
    short_help="Answer questions from private data, as many as were paid for.",
    help="Answer questions from private data, as many as were paid for: [b]dpfy serve teach[/b] "
    "makes many small models, each of a part of the data, and [b]dpfy serve start[/b] answers by "
    "their noisy vote. [b]dpfy serve student[/b] trains a model on such answers about public "
    "inputs, and releases it (PATE).",
    no_args_is_help=True,
    cls=VerbGroup,
    rich_markup_mode="rich",
)
app.command("student")(student)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
    as_json: Json = False,
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


@app.command("start")
def start(
    voters: Annotated[Path, typer.Argument(help="The folder that dpfy serve teach made.")],
    run: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Run folder of the service; one that is not finished goes on.",
            show_default=False,
        ),
    ],
    answers: Annotated[
        int | None, typer.Option(help="Most questions that are answered.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="What all answers may cost.", show_default=False)
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of the guarantee.")] = 1e-6,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Ask whether the voters agree first, this often at most.", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="The part of the voters that must agree (with --queries).")
    ] = 0.6,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of the data set, over all its releases.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Clients must send the token in this file.",
            show_default="$DPFY_SERVE_TOKEN, else a new one is printed",
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Answer everybody who reaches the address.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another host name that clients call the service by.", show_default=False
        ),
    ] = None,
    end: Annotated[
        bool,
        typer.Option(
            "--finish", help="Do not serve: end the service, write its report, erase its secrets."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer questions over HTTP from voters that never leave, as many as were paid for.

    Everything is charged before the first question; each answer is taken from that, durably, before
    its noise is drawn. When nothing is left the service refuses. A service that was stopped or
    killed goes on with the same --out. A question that was answered before costs nothing. Clients
    need the token, which is printed once on standard error. A refused request costs nothing.

    Example: dpfy serve start voters --out runs/answers --answers 1000 --epsilon 2

    Then: curl -H "Authorization: Bearer TOKEN" -H "Content-Type: application/json" -d '{"inputs":
    [[0, 0.5, ...]]}' http://127.0.0.1:8080/predict
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.core.unit import EXAMPLE, user_unit
    from dpfy.prediction import plan, service
    from dpfy.prediction.claim import AnswersClaim
    from dpfy.prediction.predictor import PrivatePredictor
    from dpfy.prediction.voters import load_voters
    from dpfy.runs.folder import held_claims
    from dpfy.runs.mark import Mark
    from dpfy.runs.released import Released
    from dpfy.runs.run import Run

    held, about = load_voters(voters)
    resume = (
        Mark.find(run) is not None and (run / "ledger.jsonl").is_file() and bool(held_claims(run))
    )
    if resume:
        claim = held_claims(run)[0]
    else:
        most = about.get("most_records")
        unit = EXAMPLE if most is None else user_unit(most)
        shape = {"voters": held.count, "classes": held.classes, "unit": unit}
        if hasattr(held, "low"):
            shape["interval"] = (held.low, held.high)
        claim = plan.service(
            epsilon, delta, answers=answers, queries=queries, threshold=threshold, **shape
        )
    if not isinstance(claim, AnswersClaim):
        raise InvalidInput("--out", str(run), f"holds a run of kind {claim.kind!r}, no service")
    place = Run(run, resume=resume, ledger=ledger)
    if end:
        with PrivatePredictor(place, claim, held) as predictor:
            folder = predictor.finish()
        tell(
            {"run": str(folder)},
            [
                f"the service is over: {folder}",
                *charged(Released.read(folder).epsilon, ledger),
                f"check it: dpfy verify {folder}",
            ],
            as_json=as_json,
        )
        return
    if no_token and token_file is not None:
        raise InvalidInput(
            "--no-token",
            "--token-file",
            "gives a token that nobody is asked for; leave one of them out",
        )
    given = None if no_token else service.given_token(token_file)
    token = given if no_token else given or service.new_token()
    allowed = service.Access.at(host, token, allow_host or ())
    with (
        service.listening(host, port) as listening,
        PrivatePredictor(place, claim, held) as predictor,
    ):
        labels = tuple(str(label) for label in about.get("labels") or ())
        application = service.application(predictor, labels, access=allowed)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        if no_token:
            print(
                "no token: everybody who reaches the address may ask", file=sys.stderr, flush=True
            )
        elif given is None:
            print(
                f"token (shown once; clients send Authorization: Bearer TOKEN): {token}",
                file=sys.stderr,
                flush=True,
            )
        tell(
            {"address": address, "run": str(run), "left": predictor.left()},
            f"serving on {address}",
            as_json=as_json,
        )
        service.serve(application, listening)
        print(one_line(f"stopped; left: {predictor.left()}"), file=sys.stderr)
