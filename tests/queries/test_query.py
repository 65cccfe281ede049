"""`dpfy query`: malformed queries cost nothing, budgets hold, a killed query resumes to the same
answers, odd tables raise nothing.
"""

from __future__ import annotations

import json
import math
import shlex

import numpy as np
import pytest

from dpfy.accounting import table
from dpfy.accounting.filters import RenyiFilter
from dpfy.cli import app, errors
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.engines.aggregates import Answered
from dpfy.queries import run
from dpfy.queries.plan import QueryTerms, plan, whole
from dpfy.report.verify import verify
from dpfy.runs.run import Run
from dpfy.statistics.language import parse
from dpfy.statistics.statistic import Spend, SumStatistic, key_of
from dpfy.tables.columns import OTHER
from dpfy.tables.schema import Schema

SCHEMA = """
missing = ["", "?"]
[columns.age]
kind = "number"
range = [0, 100]
[columns.hours]
kind = "number"
range = [0, 80]
fill = 40
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.guess]
kind = "category"
categories = ["f", "m"]
[columns.job]
kind = "category"
categories = ["a", "b", "c"]
[columns.id]
ignore = true
"""
CSV = "age,hours,sex,guess,job,id\n" + "\n".join(
    f"{20 + k % 50},{k % 60},{'fm'[k % 2]},f,{'abc'[k % 3]},{k % 17}" for k in range(200)
)

MALFORMED = [
    "",
    "   ",
    "mean",
    "mean(",
    "mean(age",
    "mean age",
    "mean()",
    "mean(age, hours)",
    "mean(agee)",
    "mean(sex)",
    "mean(3)",
    "mean(id)",
    "mean(age) by",
    "mean(age) by age",
    "mean(age) by sex, sex",
    "mean(age) where",
    "mean(age) where sex",
    "mean(age) where sex = 'q'",
    "mean(age) where sex < 'f'",
    "mean(age) where age = 'old'",
    "mean(age) where id = 3",
    "mean(age) where age > 3 by sex",
    "mean(age),",
    "mean(age) mean(hours)",
    "mean(age), mean(age)",
    "avg(sex)",
    "count() by bins(age)) ",
    "count() by bins(sex, 1, 2)",
    "count() by bins(age, 2, 1)",
    "count() by mean(age)",
    "count() by age, bins(age, 1, 2)",
    "count() by bins(age, 1, 2), bins(age, 3, 4)",
    "count() where job in ('a', 'q')",
    "count() where age in ('a')",
    "count() where age < 3 or",
    "count() level 2",
    "count(weight=0)",
    "count(distinct age)",
    "count(age)",
    "quantile(age)",
    "quantile(age, 0)",
    "quantile(age, 1.5)",
    "quantile(age, 0.9, 0.1)",
    "median(age, step=0)",
    "median(age, step=1e-9)",
    "median(age, depth=3)",
    "histogram(age, 10)",
    "histogram(age, 20, 10)",
    "histogram(age, 0, 10, bins=3)",
    "histogram(age, bins=2.5)",
    "histogram(sex, 1, 2)",
    "table(sex, age)",
    "table(sex, sex)",
    "table(sex) by sex",
    "margins(sex)",
    "margins(sex, job, order=7)",
    "covariance(age)",
    "covariance(age, age)",
    "accuracy(sex)",
    "calibration(age, job)",
    "mean(age) ; drop table",
    "mean(age) by 'sex",
    "mean(1e999)",
    "count()\ncount()",
    "mean(" + "a" * 3000 + ")",
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    (tmp_path / "d.csv").write_text(CSV)
    return tmp_path


def cli(*arguments):
    return errors.run(app._command(), ["query", *map(str, arguments)])


def asked(files, text, *more, out="q"):
    return cli(
        files / "d.csv",
        text,
        "--schema",
        files / "s.toml",
        "--epsilon",
        "1",
        "--out",
        files / out,
        *more,
    )


def held(files, text, *, out="q", seed=3, terms=None, **more):
    place = Run(files / out, seed=seed, **more)
    return run.answered(
        str(files / "d.csv"),
        text,
        schema=str(files / "s.toml"),
        terms=terms or QueryTerms(1.0),
        run=place,
    )


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_query_is_one_line_and_spends_nothing(files, capsys, text):
    ledger = files / "people.jsonl"
    Ledger.open(ledger, budget=RenyiFilter(2.0, 1e-6))
    before = ledger.read_bytes()
    assert asked(files, text, "--ledger", ledger) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("dpfy: query")
    assert shown.err.count("\n") == 1
    assert "internal error" not in shown.err
    assert ledger.read_bytes() == before
    assert not (files / "q").exists()


WRONG = [
    (["--epsilon", "0"], "epsilon"),
    (["--epsilon", "nan"], "epsilon"),
    (["--delta", "1"], "delta"),
    (["--delta", "-1"], "delta"),
    (["--person", "nobody", "--at-most", "3"], "user"),
    (["--person", "id"], "most_records"),
    (["--at-most", "3"], "most_records"),
    (["--records", "0"], "records"),
    (["--schema", "none.toml"], "none.toml"),
]


@pytest.mark.parametrize(("more", "field"), WRONG)
def test_wrong_terms_are_one_line(files, capsys, more, field):
    assert asked(files, "count()", *more) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"dpfy: {field}") or field in shown
    assert shown.count("\n") == 1
    assert not (files / "q").exists()


def test_data_that_is_not_there_spends_nothing(files, capsys):
    ledger = files / "people.jsonl"
    Ledger.open(ledger, budget=RenyiFilter(2.0, 1e-6))
    for data in (files / "none.csv", files, files / "s.toml"):
        more = [
            "--schema",
            files / "s.toml",
            "--epsilon",
            "1",
            "--out",
            files / "q",
            "--ledger",
            ledger,
        ]
        assert cli(data, "mean(age)", *more) == 2
        assert not (files / "q").exists()
    assert Ledger.read(ledger).permits() == []


def test_the_command_prints_answers_and_one_json_object(files, capsys):
    assert asked(files, "mean(age), count() by sex") == 0
    text = capsys.readouterr().out
    assert "standard error" in text
    assert "pure 1.000-differential privacy" in text
    assert asked(files, "median(age)", "--json", "--delta", "1e-6", out="r") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 1
    assert found["epsilon"] == pytest.approx(1, rel=1e-3)
    assert found["answers"][0]["statistic"] == "median(age)"
    for name in ("q", "r"):
        assert all(f.holds for f in verify(files / name))
        assert not (files / name / "checkpoint").exists()


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_whole_query_costs_what_was_asked(delta):
    columns = Schema.parse(SCHEMA, "s")
    text = (
        "count(), mean(age), quantile(age, 0.1, 0.5, 0.9), table(sex, job), variance(hours), "
        "covariance(age, hours)"
    )
    for terms in (
        QueryTerms(0.7, delta),
        QueryTerms(0.7, delta, "id", 4),
        QueryTerms(0.7, delta, records=200),
    ):
        made = plan(text, columns, terms)
        first = made.claims[0]
        spent = (
            table.accountant(first.accountant)
            .curve(whole(made.claims), first.adjacency)
            .epsilon(delta)
        )
        assert 0.7 * (1 - 2e-4) <= spent <= 0.7


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_weights_divide_the_budget_and_do_not_change_the_price(delta):
    columns, terms = Schema.parse(SCHEMA, "s"), QueryTerms(0.7, delta)
    even, uneven = (
        plan(text, columns, terms)
        for text in ("sum(age), sum(hours)", "sum(age, weight=4), sum(hours)")
    )
    first = uneven.claims[0]
    spent = (
        table.accountant(first.accountant)
        .curve(whole(uneven.claims), first.adjacency)
        .epsilon(delta)
    )
    assert 0.7 * (1 - 2e-4) <= spent <= 0.7
    much, little = (claim.parameter for claim in uneven.claims)
    assert much < even.claims[0].parameter < little
    if not delta:  # four fifths and one fifth of epsilon
        assert little / much == pytest.approx(4, rel=1e-6)


def test_groups_of_words_that_are_not_public(files):
    """From the query to a folder that verifies; the release that finds the words is paid for."""
    (files / "d.csv").write_text(
        "age,hours,sex,guess,job,id\n"
        + "\n".join(f"{20 + k % 50},{k % 60},f,f,a,{'xyz'[k % 3]}" for k in range(900))
    )
    text = "mean(age), count() by top(id) level 0.9"
    found = held(files, text, terms=QueryTerms(20.0, 1e-4))
    assert found.answers.statistics == ["top(id) level 0.9", *parse(text).texts]
    means = [a for a in found.answers if a.statistic.startswith("mean")]
    assert {a.place["id"] for a in means} == {"x", "y", "z", OTHER}
    assert {a.level for a in found.answers} == {0.9}
    assert "90% interval" in str(found)
    assert len(found.report["guarantee"]) > 1
    assert all(f.holds for f in verify(found.run))
    assert held(files, text, terms=QueryTerms(20.0, 1e-4), resume=True) == found


def test_different_persons_of_a_table(files):
    found = held(files, "count(distinct id)", terms=QueryTerms(50.0, user="id", most_records=3))
    assert [a.value for a in found.answers] == [17]


def test_gaussian_noise_where_many_are_asked_and_laplace_for_one():
    columns = Schema.parse(SCHEMA, "s")
    one, many = (
        plan("count()", columns, QueryTerms(0.5, 1e-6)),
        plan("margins(sex, guess, job), mean(age)", columns, QueryTerms(0.5, 1e-6)),
    )
    assert one.claims[0].event == events.DiscreteLaplace(one.claims[0].parameter, 1)
    text = (
        "sum(age), mean(age), variance(age), sum(hours), mean(hours), variance(hours), count(), "
        "stddev(age), stddev(hours)"
    )
    several = plan(f"{text}, covariance(age, hours)", columns, QueryTerms(0.5, 1e-6))
    assert {c.mechanism for c in several.claims} == {"gaussian"}
    assert many.claims[0].mechanism in ("gaussian", "discrete-laplace")


def test_a_budget_is_refused_with_nothing_left_behind(files):
    ledger = files / "people.jsonl"
    Ledger.open(ledger, budget=RenyiFilter(1.2, 1e-5))
    first = held(files, "count(), mean(age)", ledger=ledger, terms=QueryTerms(0.5))
    assert all(f.holds for f in verify(first.run, ledger=ledger))
    before = ledger.read_bytes()
    with pytest.raises(BudgetExceeded):
        held(files, "count(), mean(age), sum(age)", out="r", ledger=ledger, terms=QueryTerms(5.0))
    assert not (files / "r").exists()
    assert [p.entry for p in Ledger.read(ledger).permits()] == [
        p.entry for p in Ledger.open(ledger).permits()
    ]
    assert len(Ledger.read(ledger).permits()) == 2
    assert ledger.read_bytes().startswith(before)


def test_a_public_number_that_is_not_that_of_the_data_is_refused_and_spends_nothing(files, capsys):
    """In one line that does not tell the number; also after a crash, where what was reserved
    stays.
    """
    ledger = files / "people.jsonl"
    for records in ("199", "201"):
        assert asked(files, "mean(age)", "--records", records, "--ledger", str(ledger)) == 2
        line = capsys.readouterr().err.strip()
        assert line.count("\n") == 0
        assert "records" in line
        assert "200" not in line
        assert not (files / "q").exists()
        assert Ledger.read(ledger).permits() == []
    ledger.unlink()
    found = held(files, "mean(age)", terms=QueryTerms(0.5, records=200))
    assert found.report["guarantee"]["adjacency"] == "replace-one"
    with pytest.raises(InvalidInput, match="finished"):
        held(files, "mean(age)", terms=QueryTerms(0.5, records=201), resume=True)


def test_a_finished_run_is_told_again_and_another_query_is_refused(files):
    first = held(files, "count()")
    assert held(files, "count()", resume=True) == first
    with pytest.raises(InvalidInput, match="finished"):
        held(files, "sum(age)", resume=True)


def test_an_interrupted_query_resumes_to_the_same_answers_and_refuses_other_data(
    files, monkeypatch
):
    text = "mean(age), quantile(age, 0.25, 0.5, 0.75), count() by sex"
    due = held(files, text, out="whole")
    real, calls = SumStatistic.release, []

    def stopped(self, table, spend):
        calls.append(table.rows())
        if table.rows() and calls.count(200) == 2:
            raise KeyboardInterrupt
        return real(self, table, spend)

    monkeypatch.setattr(SumStatistic, "release", stopped)
    with pytest.raises(KeyboardInterrupt):
        held(files, text)
    (files / "d.csv").write_text(CSV + "\n99,1,f,f,a,1")
    with pytest.raises(InvalidInput, match="resume query"):
        held(files, text, resume=True)
    (files / "d.csv").write_text(CSV)
    again = held(files, text, resume=True)
    assert again.answers == due.answers
    assert all(f.holds for f in verify(again.run))


@pytest.mark.parametrize(
    "text", ["top(sex)", "range(age)", "count() by job", "mean(age) where hours > 3"]
)
def test_all_that_an_answer_depends_on_is_bound(text):
    """Other cells than before a crash are told from the same ones, also where they are read in the
    same way by other statistics.
    """
    columns = Schema.parse(SCHEMA, "s")
    made = plan(text, columns, QueryTerms(1.0, 1e-6))
    cells = {
        "age": [500, 7],
        "hours": [1, 2],
        "sex": ["x", "f"],
        "job": ["a", "b"],
        "guess": ["f", "f"],
        "id": [1, 2],
    }
    other = cells | {"age": [600, 8], "hours": [5, 2], "sex": ["y", "f"], "job": ["c", "b"]}
    key = key_of(Randomness.for_tests(1))
    tags = set()
    for data in (cells, dict(cells), other):
        table, limit = run.table_of(data, made), made.terms.contribution
        pairs = zip(made.statistics, made.claims, strict=True)
        tags.add(Answered(table, [s.asked(columns, c, limit, key) for s, c in pairs]).content)
    assert len(tags) == 2


def test_an_interruption_says_how_to_go_on(files, capsys, monkeypatch):
    real = SumStatistic.release

    def stopped(self, table, spend):
        if table.rows():
            raise KeyboardInterrupt
        return real(self, table, spend)

    monkeypatch.setattr(SumStatistic, "release", stopped)
    assert asked(files, "count() where sex = 'f'") == 130
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0
    monkeypatch.undo()
    command = line.partition("goes on, to the same bits and at no more cost, with: dpfy query ")[2]
    assert cli(*shlex.split(command)) == 0
    assert all(f.holds for f in verify(files / "q"))
    assert "data" not in (files / "q" / "config.toml").read_text()
    assert asked(files, "count()", "--resume", out="nothing") == 2
    assert not (files / "nothing").exists()


def test_the_same_answers_from_every_kind_of_table(files):
    import pandas
    import pyarrow

    frame = pandas.read_csv(files / "d.csv")
    due = held(files, "mean(age), count(), median(hours) by sex").answers
    tables = [
        frame,
        pyarrow.Table.from_pandas(frame),
        {name: frame[name].tolist() for name in frame},
        {name: frame[name].to_numpy() for name in frame},
        frame.to_records(index=False),
    ]
    for number, data in enumerate(tables):
        place = Run(files / f"t{number}", seed=3)
        text = "mean(age), count(), median(hours) by sex"
        assert (
            run.answered(
                data, text, schema=str(files / "s.toml"), terms=QueryTerms(1.0), run=place
            ).answers
            == due
        )


ODD_NAMES = """
[columns.quantile]
kind = "category"
categories = ["<b>"]
[columns.x]
kind = "number"
range = [0, 9]
[columns.w]
ignore = true
"""


def test_words_of_the_data_and_names_of_columns_do_no_harm(files):
    """A frequent word is released as it is: pages must not take it for markup, nor a column for a
    part of the answer.
    """
    bad = "<script>alert(1)</script>[red]\x1b[2J"
    (files / "s.toml").write_text(ODD_NAMES)
    data = {"quantile": ["<b>"] * 300, "x": [3] * 300, "w": [bad] * 300}
    text, place = "top(w), median(x, step=1) by quantile", Run(files / "q", seed=1)
    found = run.answered(
        data, text, schema=str(files / "s.toml"), terms=QueryTerms(4.0, 1e-6), run=place
    )
    assert found.answers[0].place == {"quantile": "<b>", "w": bad}
    assert found.answers[-2].place == {"quantile": "<b>", "quantile of the answer": "0.5"}
    for page in ("report.html", "report.md", "privacy.json", "answers.json"):
        text = (files / "q" / page).read_text()
        assert "\x1b" not in text
        assert "<script>alert" not in text or page.endswith("json")
    assert all(f.holds for f in verify(files / "q"))
    (files / "s.toml").write_text("[columns.c]\nkind='category'\ncategories=['(other)']\n")
    with pytest.raises(InvalidInput, match="must not be listed"):
        Schema.of(str(files / "s.toml"))


def test_users_are_protected_as_a_whole(files):
    terms = QueryTerms(1.0, 0.0, "id", 12, 2, 6)
    found = held(files, "count() by job", terms=terms)
    assert "user" in found.report["statement"]
    (claim,) = plan("count() by job", Schema.parse(SCHEMA, "s"), terms).claims
    assert (claim.bound, claim.parameter) == (12, pytest.approx(1 / 12))
    assert all(f.holds for f in verify(found.run))


ODD = [
    "",
    "?",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "1_0",
    "x",
    None,
    True,
    10**400,
    -(10**400),
    3,
    50.0,
    1e308,
    float("nan"),
    "f",
    "m",
    b"f",
]
EVERYTHING = (
    "count(), sum(age), mean(age), variance(hours), covariance(age, hours), histogram(age, 0, 10, "
    "90), quantile(age, 0.2, 0.5, 0.9), "
    "min(hours), max(age), table(sex, job), margins(sex, job, guess), accuracy(sex, guess), "
    "confusion(sex, guess), calibration(age, sex)"
)


def odd_table(source):
    n = int(source.choice([0, 1, 2, 5, 30]))
    kind = source.integers(4)
    if kind == 0:  # constant
        cell = ODD[source.integers(len(ODD))]
        return {name: [cell] * n for name in ("age", "hours", "sex", "guess", "job", "id")}
    if kind == 1:  # arrays of numbers
        dtype = source.choice(["float64", "int8", "bool", "float16", "uint64"])
        with np.errstate(all="ignore"):
            return {
                name: (source.normal(0, 1e3, n)).astype(dtype)
                for name in ("age", "hours", "sex", "guess", "job", "id")
            }
    return {
        name: [ODD[k] for k in source.integers(len(ODD), size=n)]
        for name in ("age", "hours", "sex", "guess", "job", "id")
    }


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_odd_tables_raise_nothing(count):
    """Every statistic on tables with anything in them: the same number of answers, each inside what
    it can be.
    """
    from dpfy.core.randomness import Randomness
    from dpfy.core.values import mock_permit

    columns, source = Schema.parse(SCHEMA, "s"), np.random.default_rng(count)
    grouped = "mean(age), count(), quantile(hours, 0.3, 0.6), variance(age) by sex where age > 3"
    plans = [
        plan(EVERYTHING, columns, QueryTerms(2.0)),
        plan(grouped, columns, QueryTerms(2.0, 1e-6, "id", 3)),
    ]
    sizes = None
    for _ in range(count):
        data, found = odd_table(source), []
        for made in plans:
            private = run.table_of(data, made)
            for statistic, claim in zip(made.statistics, made.claims, strict=True):
                permit = mock_permit(
                    claim.event, claim.releases, claim.name, adjacency=claim.adjacency
                )
                answers = statistic.release(
                    private, Spend(claim, made.terms.contribution, permit, Randomness.for_tests(1))
                )
                found += answers
        shape = [(a.statistic, tuple(a.place.items())) for a in found]
        assert sizes in (None, shape), "which answers there are must not depend on the data"
        sizes = shape
        for answer in found:
            assert answer.value is None or math.isfinite(answer.value)
            assert answer.interval is None or answer.interval[0] <= answer.interval[1]


def test_the_accuracy_of_a_model_on_a_public_number_of_records():
    """One replaced record moves it by 1/m: Laplace noise of scale 1 / (m epsilon)."""
    (claim,) = plan(
        "accuracy(sex, guess)", Schema.parse(SCHEMA, "s"), QueryTerms(0.5, records=200)
    ).claims
    assert claim.bound * claim.parameter / 200 == pytest.approx(1 / (200 * 0.5))


def test_the_salary_mean_of_the_guide():
    """n = 10^4 public, B = 10^6, epsilon 1/2, delta 1e-6: standard deviation 806; 68% within 806,
    95% within 1,612 over 10^5 draws.
    """
    from dpfy.accounting import gaussian
    from dpfy.core.randomness import Randomness
    from dpfy.core.values import mock_permit
    from dpfy.engines.contributions import ContributionLimit
    from dpfy.mechanisms.additive import GaussianMechanism
    from dpfy.statistics.claim import BudgetShare
    from dpfy.statistics.functions import build
    from dpfy.statistics.language import parse
    from dpfy.statistics.statistic import spread_of
    from dpfy.tables.columns import Number
    from dpfy.tables.table import PrivateTable

    columns = {"salary": Number("salary", 0, 1e6)}
    (mean,) = build(parse("mean(salary)"), columns, 10_000)
    multiplier = gaussian.sigma_analytic(0.5, 1e-6)
    claim = mean.claim(
        ContributionLimit(),
        BudgetShare(1 / multiplier, "gaussian"),
        adjacency="replace-one",
        delta=1e-6,
        records=10_000,
    )
    assert table.accountant("tight").curve(claim.event, claim.adjacency).epsilon(
        1e-6
    ) == pytest.approx(0.5, rel=1e-4)
    salaries = np.linspace(2e4, 2e5, 10_000)
    permit = mock_permit(claim.event, 1, claim.name, adjacency=claim.adjacency)
    (answer,) = mean.release(
        PrivateTable({"salary": salaries}, columns),
        Spend(claim, ContributionLimit(), permit, Randomness.for_tests(2)),
    )
    assert answer.standard_error == pytest.approx(806, abs=0.5)
    assert abs(answer.value - salaries.mean()) < 5 * 806
    assert 1e6 / 1e4 * gaussian.sigma_pei(0.5, 1e-6) == pytest.approx(1026, abs=1)
    assert 1e6 / 1e4 * gaussian.sigma_blog(0.5, 1e-6) == pytest.approx(1070, abs=1)
    bound = ContributionLimit().bound(mean.one("l2"))
    noise = GaussianMechanism(claim.parameter)
    from dpfy.core.values import Bounded

    zeros = Bounded(np.zeros(100_000), bound)
    draws = noise.release(
        zeros, mock_permit(noise.event, 1, adjacency=claim.adjacency), Randomness.for_tests(4)
    ).value
    errors = np.abs(draws) * 5e5 / 10_000  # in dollars: half the range, over the records
    assert (errors <= 806).mean() == pytest.approx(0.6827, abs=0.006)
    assert (errors <= 1612).mean() == pytest.approx(0.9545, abs=0.003)
    assert spread_of(claim).scale * 5e5 / 10_000 == pytest.approx(806, abs=0.5)


def test_another_schema_is_another_claim(files):
    columns = Schema.parse(SCHEMA, "s")
    wider = Schema.parse(SCHEMA.replace("range = [0, 100]", "range = [0, 101]"), "s")
    for text in ("median(age)", "count() where age > 3", "histogram(age, 0, 50)"):
        assert (
            plan(text, columns, QueryTerms(1.0)).claims != plan(text, wider, QueryTerms(1.0)).claims
        )
