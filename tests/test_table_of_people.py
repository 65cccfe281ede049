"""A table of people, with all that such tables have, through every command and through Python: one
ledger, one budget, every patient protected with at most five of their rows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch

import dpfy
from dpfy import accounting
from dpfy.cli.app import main
from dpfy.core.errors import BudgetExceeded, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.estimators import LogisticRegression
from dpfy.tables import sources

ROOT = Path(__file__).parents[1]
SIZES = [
    pytest.param((2000, 600), id="2000 rows"),
    pytest.param((20_000, 6_000), id="20000 rows", marks=pytest.mark.slow),
]
AT_MOST = 5
FACTS = {
    "date": 'range = ["2022-01-01", "2023-12-31"]',
    "age": "range = [18, 90]",
    "ward": 'categories = ["surgery", "medicine", "emergency", "maternity"]',
    "charge": "range = [0, 4000]",
    "readmitted": 'classes = ["no", "yes"]',
}
"""What the public knows of the columns that `dpfy init` leaves open; the codes are in a list."""
NEW = 'date,age,ward,code,charge,note\n2022-03-04,71,surgery,C05,"$1,200.00",sent home\n,old,,?,,\n'
SPEND = {"query": 0.5, "fit": 0.5, "train": 1.0, "tune": 1.0, "synthesize": 1.0, "serve": 0.5}


@pytest.fixture(params=SIZES)
def rows(request, tmp_path, monkeypatch) -> list[dict[str, str]]:
    """The table in visits.csv, in the folder where the commands run."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("visits", ROOT / "examples" / "visits.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    table: list[dict[str, str]] = made.visits(*request.param)
    made.write(Path("visits.csv"), table)
    Path("new.csv").write_text(NEW)
    return table


def call(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def done(capsys, *words: object) -> str:
    """What a command that works prints. Nothing of it is a figure of the table."""
    status, out, err = call(capsys, *words)
    assert status == 0, (words, err)
    assert not re.search(r"\bP\d{5}\b", out + err), "no person is named"
    return out


def drafted(capsys) -> None:
    """The schema that `dpfy init` drafts, with its open places filled in."""
    done(
        capsys, "init", "visits.csv", "--label", "readmitted", "--person", "patient", "--at-most", 5
    )
    file = Path("visits.schema.toml")
    text = file.read_text()
    facts = FACTS | {"code": f"categories = {json.dumps(Path('codes.txt').read_text().split())}"}
    for name, fact in facts.items():
        key = fact.split(" ")[0]
        text, found = re.subn(
            rf'(\[columns\.{name}\]\n[^\[]*?){key} = "\?"', lambda m, f=fact: m[1] + f, text
        )
        assert found == 1, (name, text)
    assert '= "?"' not in text, "a draft of this table leaves no other place open"
    text = text.replace(
        '[columns.note]\nkind = "text"', '[columns.note]\nkind = "text"\nbuckets = 16'
    )
    text = re.sub(r"(\[columns\.code\]\n)", r"\1buckets = 64\n", text)
    file.write_text(text)


def adds_up(ledger: Path, runs: list[Path], budget: float) -> None:
    """The ledger's total is what its accountant says of all that the runs reserved, and what the
    budget counts is at least that, and within it.
    """
    held = Ledger.read(ledger)
    assert held.unit.name == "user"
    kept = [permit for permit in held.permits() if not permit.claim.get("given_back")]
    for run in runs:
        of_run = Ledger.read(run / "ledger.jsonl").permits()
        events = [(permit.event, permit.uses) for permit in kept]
        assert of_run
        assert all((permit.event, permit.uses) in events for permit in of_run), run
    data = dpfy.Dataset("visits.csv", ledger=ledger)
    total = held.guarantee(accounting.accountant("tight")).epsilon(1e-5)
    assert 0 < total <= data.spent().epsilon <= budget
    assert data.spent().epsilon + data.left().epsilon == pytest.approx(budget)


def test_the_command_line(rows, capsys):
    people = len({row["patient"] for row in rows})
    drafted(capsys)
    done(
        capsys, "ledger", "create", "visits.jsonl", "--epsilon", 8, "--delta", 1e-5, "--at-most", 5
    )
    table = ["visits.csv", "--schema", "visits.schema.toml", "--person", "patient", "--at-most", 5]
    ledger = ["--ledger", "visits.jsonl"]
    records = ["--records", round(0.8 * people)]
    search = ["--trials", 2, "--law", "logarithmic", "--set", "training.steps=10", "--over"]
    commands = {
        "query": ["query", table[0], "mean(age), mean(charge) by ward", *table[1:]],
        "fit": ["fit", *table, "--estimator", "logistic"],
        "train": ["train", *table, *records, "--steps", 40],
        "tune": ["tune", *table, *records, *search, "training.learning_rate=0.1..2 log"],
        "synthesize": ["synthesize", *table, "--method", "mst"],
        "serve": ["serve", "start", "voters", "--answers", 20, "--finish"],
    }
    done(capsys, "serve", "teach", *table, "--voters", 50, "--out", "voters")
    for name, words in commands.items():
        cost = ["--epsilon", SPEND[name], "--delta", 1e-6, *ledger, "--out", f"runs/{name}"]
        told = done(capsys, *words, *cost)
        assert "of 8 spent" in told, f"{name} says what is left of the budget"
        assert ("the budget counts more" in told) == (name == "query"), "the first run"
    runs = sorted(Path("runs").iterdir())
    assert len(runs) == len(SPEND)
    for name in ("fit", "train", "tune"):
        assert len(done(capsys, "predict", f"runs/{name}", "new.csv").splitlines()) == 3
    for run in runs:
        done(capsys, "report", run)
        assert "one user" in json.loads((run / "privacy.json").read_text())["statement"]
    assert "6 of 6 verified" in done(capsys, "verify", *runs)
    assert "6 of 6 verified" in done(capsys, "verify", *runs, *ledger)
    shown = json.loads(done(capsys, "ledger", "show", "visits.jsonl", "--json"))
    assert {entry["run"] for entry in shown["entries"]} == set(SPEND)
    assert {entry["state"] for entry in shown["entries"]} == {"finished"}
    assert shown["unit"] == {"name": "user", "most_records": 5}
    adds_up(Path("visits.jsonl"), runs, 8)

    # more than is left is refused before the table is looked for, and costs nothing
    before = Path("visits.jsonl").read_bytes()
    os.rename("visits.csv", "moved.csv")
    header = ",".join(rows[0]) + "\n"
    for name, words in commands.items():
        Path("visits.csv").unlink(missing_ok=True)
        if name == "fit":
            Path("visits.csv").write_text(header)  # the names of the columns are public
        cost = ["--epsilon", 60, "--delta", 1e-6, *ledger, "--out", f"runs/more-{name}"]
        status, out, err = call(capsys, *words, *cost)
        assert (status, out) == (2, ""), name
        assert "the budget is epsilon 8" in err, (name, err)
        assert not Path(f"runs/more-{name}").exists()
    assert Path("visits.jsonl").read_bytes() == before


def test_python(rows, capsys, monkeypatch):
    drafted(capsys)
    people = dpfy.Dataset(
        "visits.csv", schema="visits.schema.toml", unit=dpfy.Person("patient", at_most=AT_MOST),
        ledger="python.jsonl", budget=dpfy.Budget(8, 1e-5),
    )  # fmt: skip
    net = torch.nn.Linear(people.width, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train(epsilon):
        return dpfy.fit(
            net, people, optimizer=optimizer, epsilon=epsilon, steps=20, batch_size=200,
            run=f"runs/train{epsilon}",
        )  # fmt: skip

    def serve(epsilon):
        with dpfy.serve(people, epsilon=epsilon, answers=20, run=f"runs/serve{epsilon}") as service:
            assert service.answer({"age": 70, "ward": "surgery"}).label in ("no", "yes")
        return service.released

    def fit(epsilon):
        return LogisticRegression(epsilon=epsilon, run=f"runs/fit{epsilon}").fit(people)

    families = {
        "query": lambda e: dpfy.query(people, "mean(age) by ward", epsilon=e, run=f"runs/query{e}"),
        "fit": fit,
        "train": train,
        "tune": lambda e: dpfy.tune(
            LogisticRegression(), {"norm": [0.5, 1.0]}, people, epsilon=e, trials=2, law="logarithmic",
            run=f"runs/tune{e}",
        ),
        "synthesize": lambda e: dpfy.synthesize(
            people, epsilon=e, method="mst", run=f"runs/synthesize{e}"
        ),
        "serve": serve,
    }  # fmt: skip
    found = {name: make(SPEND[name]) for name, make in families.items()}
    runs = sorted(Path("runs").iterdir())
    for run in runs:
        assert all(each.holds for each in dpfy.verify(run)), run
        assert all(each.holds for each in dpfy.verify(run, ledger="python.jsonl")), run
    for name in ("fit", "tune"):
        assert len(dpfy.predict(f"runs/{name}{SPEND[name]}", "new.csv").predicted()) == 2
    assert len(dpfy.predict("runs/train1.0", "new.csv", model=net).predicted()) == 2
    for name in ("query", "tune", "synthesize", "serve", "train"):
        assert "one user" in found[name].statement
        assert found[name].epsilon <= SPEND[name]
    adds_up(Path("python.jsonl"), runs, 8)

    before = Path("python.jsonl").read_bytes()

    def reads(*_, **__):
        raise AssertionError("the data is read")

    monkeypatch.setattr(sources, "_parted", reads)
    monkeypatch.setattr(sources, "_parquet", reads)
    with pytest.raises(InvalidInput, match="optimizer"):
        dpfy.fit(net, people, optimizer=None, epsilon=0.1, steps=20, batch_size=200)
    for name, make in families.items():
        with pytest.raises(BudgetExceeded, match="epsilon 8"):
            make(60.0)
        assert not Path(f"runs/{name}60.0").exists()
    assert Path("python.jsonl").read_bytes() == before
