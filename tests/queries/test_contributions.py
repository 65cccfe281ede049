"""How many records users own, asked privately: the bound of a training that follows, billed in the
same ledger.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Unit
from dpfy.queries.plan import QueryTerms
from dpfy.queries.run import answered
from dpfy.report.verify import verify
from dpfy.tables.columns import OpenColumn

WHO = {"who": OpenColumn("who")}
OWNERS = np.repeat(np.arange(400), np.r_[np.full(360, 5), np.full(39, 20), 3000])


def asked(path, owners=OWNERS, text="quantile(contributions, 0.9)", **terms):
    given = {"epsilon": 1.0, "user": "who", "contributions": 200} | terms
    return answered({"who": owners}, text, schema=WHO, terms=QueryTerms(**given), run=path)


def test_a_quantile_of_contributions_is_found_and_one_user_is_one_row(tmp_path):
    found = asked(tmp_path / "a")
    assert 5 <= found.answers[0].value <= 20
    assert found.report["guarantee"]["unit"] == "user"
    assert found.report["guarantee"]["epsilon"] == pytest.approx(1.0, rel=1e-6)
    assert all(finding.holds for finding in verify(tmp_path / "a"))
    many = np.concatenate([OWNERS, np.full(100_000, 999)])
    counted = asked(tmp_path / "b", many, "count()", epsilon=20.0)
    assert abs(counted.answers[0].value - 401) <= 3, "a user with 100,000 records counts once"


def test_the_command_line_finds_k_and_trains_with_it_from_one_budget(tmp_path, capsys):
    rows = "\n".join(f"p{who:03d},{k % 10},{'xy'[k % 2]}" for k, who in enumerate(OWNERS[:1900]))
    (tmp_path / "people.csv").write_text(f"person,a,c\n{rows}\n")
    (tmp_path / "s.toml").write_text(
        '[columns.person]\nignore = true\n[columns.a]\nkind = "number"\nrange = [0, '
        '9]\n[columns.c]\nkind = "label"\nclasses = ["x", "y"]\n'
    )

    def call(*words) -> dict:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        shown = capsys.readouterr()
        assert stop.value.code == 0, shown.err
        return json.loads(shown.out) if "--json" in words else {}

    data, schema, ledger = tmp_path / "people.csv", tmp_path / "s.toml", tmp_path / "people.jsonl"
    call("ledger", "create", ledger, "--epsilon", 8, "--delta", 1e-4, "--unit", "user")
    owner = ["--user", "person", "--contributions", 64, "--ledger", ledger]
    told = call(
        "query",
        data,
        "quantile(contributions, 0.9)",
        "--schema",
        schema,
        "--epsilon",
        1,
        *owner,
        "--out",
        tmp_path / "q",
        "--json",
    )
    k = int(told["answers"][0]["value"])
    assert 3 <= k <= 64
    job = [
        f"data.{part}"
        for part in (f"schema={schema}", "user=person", f"most_records={k}", "test_fraction=0.2")
    ]
    sets = [word for part in (*job, f"data.path={data}") for word in ("--set", part)]
    more = [
        "--model",
        "linear",
        "--steps",
        2,
        "--batch-size",
        20,
        "--epsilon",
        2,
        "--delta",
        1e-4,
        "--ledger",
        ledger,
    ]
    call("train", *sets, *more, "--records", 100, "--out", tmp_path / "r", "--json")
    held = Ledger.read(ledger)
    assert [permit.claim["kind"] for permit in held.permits()] == ["query", "training"]
    assert all(finding.holds for finding in verify(tmp_path / "r", ledger=ledger))
    assert all(finding.holds for finding in verify(tmp_path / "q", ledger=ledger))


def test_a_ledger_of_users_takes_any_number_of_their_records_and_nobody_elses(tmp_path):
    Ledger.open(tmp_path / "u.jsonl", unit=Unit("user", 5))
    Ledger.open(tmp_path / "u.jsonl", unit=Unit("user", 64))
    for other in (
        Unit(),
        Unit("client", 5),
        Unit("user", 5, "window"),
        Unit("user's day", 5, "window"),
    ):
        with pytest.raises(InvalidInput, match="ledger unit"):
            Ledger.open(tmp_path / "u.jsonl", unit=other)
    Ledger.open(tmp_path / "e.jsonl")
    with pytest.raises(InvalidInput, match="ledger unit"):
        Ledger.open(tmp_path / "e.jsonl", unit=Unit("example", 2))


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"user": None}, "needs user"),
        ({"contributions": 1}, "contributions"),
        ({"most_records": 3}, "each is one row"),
    ],
)
def test_bad_terms_are_refused(tmp_path, terms, said):
    with pytest.raises(InvalidInput, match=said):
        asked(tmp_path / "no", **terms)
    with pytest.raises(InvalidInput, match="who"):
        asked(tmp_path / "no", text="top(who)")
