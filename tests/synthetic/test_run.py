"""A synthesis in its folder: verified, resumed to the same bits wherever it was killed, refused
without a trace.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from made_up_people import SCHEMA, people, write_csv

import dpfy
from dpfy.accounting import GaussianFilter, RenyiFilter
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.runs.run import Run
from dpfy.synthetic import run as runs
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.methods import METHODS
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms, plan
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.run import synthesize_table

DOMAIN = Domain.parse(SCHEMA, "people.toml")
TERMS = SynthesisTerms(1.0, 1e-6)
MST = SynthesisOptions("mst")


def rows_of(made) -> list[dict[str, str]]:
    with made.table.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_a_folder_that_verifies(tmp_path, method):
    made = synthesize_table(
        people(300),
        schema=DOMAIN,
        terms=TERMS,
        run=tmp_path / "run",
        options=SynthesisOptions(method, rows=70),
    )
    assert all(finding.holds for finding in dpfy.verify(made.run))
    (opinion,) = [f.detail for f in dpfy.verify(made.run) if f.what == "second accountant agrees"]
    assert "dp-accounting: guarantee" in opinion
    rows = rows_of(made)
    assert len(rows) == 70
    for column in DOMAIN.columns:  # all values are in the schema
        codes = column.codes([row[column.name] for row in rows])
        assert ((codes >= 0) & (codes < column.cells)).all()
    assert 0.98 < made.report["guarantee"]["epsilon"] <= 1.0
    assert not (made.run / "checkpoint").exists()
    assert set(made.facts["error"]) <= {"1", "2", "3"}
    section = made.report["sections"][0]
    assert section["kind"] == "synthesis"
    assert section["measured"] == made.facts["measured"]


def test_the_table_is_close_at_a_large_epsilon(tmp_path):
    records = people(4000)
    made = synthesize_table(
        records, schema=DOMAIN, terms=SynthesisTerms(20.0, 1e-6), run=tmp_path / "run"
    )
    assert made.facts["error"]["2"]["mean_l1"] < 0.03
    assert abs(made.facts["records_estimated"] - 4000) < 20
    rich = np.mean([row["rich"] == "yes" for row in rows_of(made) if int(row["age"]) > 60])
    due = np.mean(
        [r == "yes" for r, a in zip(records["rich"], records["age"], strict=True) if int(a) > 60]
    )
    assert abs(rich - due) < 0.05


def test_the_same_secret_gives_the_same_table(tmp_path):
    made = [
        synthesize_table(
            people(200), schema=DOMAIN, terms=TERMS, run=Run(tmp_path / name, seed=3), options=MST
        )
        for name in "ab"
    ]
    assert made[0].table.read_bytes() == made[1].table.read_bytes()
    other = synthesize_table(
        people(200), schema=DOMAIN, terms=TERMS, run=Run(tmp_path / "c", seed=4), options=MST
    )
    assert other.table.read_bytes() != made[0].table.read_bytes()
    assert "fixed" in made[0].report["provenance"]["seed"]


class Stop(BaseException):
    """As a kill: nothing is undone."""


@pytest.mark.parametrize("method", ["aim", pytest.param("mst", marks=pytest.mark.slow)])
def test_stopped_at_every_release_and_resumed_to_the_same_bits(tmp_path, monkeypatch, method):
    options, records = SynthesisOptions(method), people(150)
    whole = synthesize_table(
        records, schema=DOMAIN, terms=TERMS, run=Run(tmp_path / "whole", seed=9), options=options
    )
    steps = {"aim": [0, 6], "mst": [0, 4, 10]}[method]
    real = MarginalReleases._bind
    for step in steps:
        for after in (False, True):

            def bind(self, *rest, step=step, after=after):
                if self.step == step and not after:
                    raise Stop
                real(self, *rest)
                if self.step == step:
                    raise Stop

            place = tmp_path / f"{step}-{after}"
            with monkeypatch.context() as patch:
                patch.setattr(MarginalReleases, "_bind", bind)
                with pytest.raises(Stop):
                    synthesize_table(
                        records,
                        schema=DOMAIN,
                        terms=TERMS,
                        run=Run(place, seed=9),
                        options=options,
                    )
            assert not (place / "synthetic.csv").exists()
            again = synthesize_table(
                records,
                schema=DOMAIN,
                terms=TERMS,
                run=Run(place, resume=True, seed=9),
                options=options,
            )
            for name in ("synthetic.csv", "synthesis.json", "measurements.safetensors"):
                assert (again.run / name).read_bytes() == (whole.run / name).read_bytes()
            assert all(finding.holds for finding in dpfy.verify(again.run))


def test_a_resumed_run_refuses_other_data(tmp_path, monkeypatch):
    real = MarginalReleases._bind

    def bind(self, *rest):
        real(self, *rest)
        if self.step == 2:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(MarginalReleases, "_bind", bind)
        with pytest.raises(Stop):
            synthesize_table(people(150), schema=DOMAIN, terms=TERMS, run=tmp_path / "run")
    with pytest.raises(InvalidInput, match="must be what the run had"):
        synthesize_table(
            people(151), schema=DOMAIN, terms=TERMS, run=Run(tmp_path / "run", resume=True)
        )
    crossed = people(150)  # the same columns, one by one, that go together in another way
    crossed["age"] = crossed["age"][::-1]
    with pytest.raises(InvalidInput, match="must be what the run had"):
        synthesize_table(
            crossed, schema=DOMAIN, terms=TERMS, run=Run(tmp_path / "run", resume=True)
        )
    with pytest.raises(InvalidInput, match=r"run|resume"):
        synthesize_table(
            people(150),
            schema=DOMAIN,
            terms=SynthesisTerms(2.0, 1e-6),
            run=Run(tmp_path / "run", resume=True),
        )
    with pytest.raises(InvalidInput, match="holds an unfinished run"):
        synthesize_table(people(150), schema=DOMAIN, terms=TERMS, run=tmp_path / "run")


def test_killed_by_the_operating_system_and_resumed_to_the_same_bits(tmp_path):
    """kill -9 of a process that stops itself inside a release; the next one goes on."""
    write_csv(tmp_path / "people.csv", people(200))
    (tmp_path / "people.toml").write_text(SCHEMA)
    script = textwrap.dedent("""
        import os, signal, sys
        from dpfy.runs.run import Run
        from dpfy.synthetic.releases import MarginalReleases
        from dpfy.synthetic.run import SynthesisTerms, synthesize_table
        place, kill, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
        real = MarginalReleases._bind
        def bind(self, *rest):
            real(self, *rest)
            if self.step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
        MarginalReleases._bind = bind
        synthesize_table("people.csv", schema="people.toml", terms=SynthesisTerms(1.0, 1e-6), run=Run(place, resume=resume, seed=5))
    """)  # noqa: E501

    def process(*arguments):
        environment = os.environ | {
            "PYTHONPATH": str(Path(dpfy.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [sys.executable, "-P", "-c", script, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )

    place = Run(tmp_path / "whole", seed=5)
    synthesize_table(
        tmp_path / "people.csv", schema=DOMAIN, terms=SynthesisTerms(1.0, 1e-6), run=place
    )
    assert process("killed", "8", "fresh").returncode == -signal.SIGKILL
    assert process("killed", "-1", "resume").returncode == 0
    assert (tmp_path / "killed" / "synthetic.csv").read_bytes() == (
        tmp_path / "whole" / "synthetic.csv"
    ).read_bytes()
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "killed"))


def test_a_finished_run_is_given_back_as_it_is(tmp_path):
    made = synthesize_table(
        people(100),
        schema=DOMAIN,
        terms=TERMS,
        run=tmp_path / "run",
        options=SynthesisOptions("mst"),
    )
    again = synthesize_table(
        people(3),
        schema=DOMAIN,
        terms=TERMS,
        run=Run(tmp_path / "run", resume=True),
        options=SynthesisOptions("mst"),
    )
    assert again.facts == made.facts


def test_the_ledger_of_the_data_set_bears_the_bill(tmp_path):
    ledger, budget = tmp_path / "people.jsonl", RenyiFilter(2.0, 1e-6)
    place = Run(tmp_path / "a", ledger=ledger, budget=budget)
    made = synthesize_table(
        people(100), schema=DOMAIN, terms=TERMS, run=place, options=SynthesisOptions("mst")
    )
    assert all(finding.holds for finding in dpfy.verify(made.run, ledger=ledger))
    with pytest.raises(BudgetExceeded):
        synthesize_table(
            people(100),
            schema=DOMAIN,
            terms=SynthesisTerms(1.8, 1e-6),
            run=Run(tmp_path / "b", ledger=ledger, budget=budget),
        )
    assert not (tmp_path / "b").exists()
    assert len(Ledger.read(ledger).permits()) == 1
    gaussian = GaussianFilter(1.5, 1e-6)
    second = Run(tmp_path / "c", ledger=tmp_path / "other.jsonl", budget=gaussian)
    synthesize_table(
        {"a": [1] * 100},
        schema=Domain.of({"a": 4}),  # one column: nothing is chosen
        terms=SynthesisTerms(0.5, 1e-6),
        run=second,
        options=SynthesisOptions("mst"),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("rich"), "rich"),
        (lambda c: c.update(wage=c["age"]), "wage"),
        (lambda c: c.update(age=c["age"][:-1]), "different lengths"),
    ],
)
def test_bad_records_leave_nothing_and_cost_nothing(tmp_path, change, words):
    records, ledger = people(50), tmp_path / "people.jsonl"
    change(records)
    with pytest.raises(InvalidInput, match=words):
        synthesize_table(
            records, schema=DOMAIN, terms=TERMS, run=Run(tmp_path / "run", ledger=ledger)
        )
    assert not (tmp_path / "run").exists()
    assert Ledger.read(ledger).spent() == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"options": SynthesisOptions(workload=[["age", "wage"]])}, "workload"),
        ({"options": SynthesisOptions(workload=[["age", "age"]])}, "workload"),
        ({"options": SynthesisOptions(workload=[])}, "workload"),
        ({"options": SynthesisOptions(workload=9)}, "workload"),
        ({"options": SynthesisOptions(target="wage")}, "target"),
        ({"terms": SynthesisTerms(1.0, 1e-6, user="person", most_records=3)}, "user"),
        ({"schema": "no-such-schema.toml"}, "no-such-schema"),
        ({"public": {"age": ["3"]}}, "job|grade|rich|since"),
    ],
)
def test_what_is_wrong_for_a_public_reason_is_refused_before_the_data_is_read(
    tmp_path, asked, words
):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError("the data was read")

    about = {"schema": DOMAIN, "terms": TERMS} | asked
    with pytest.raises(DpfyError, match=words):
        synthesize_table(Untouchable(), run=tmp_path / "run", **about)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: SynthesisOptions("gan"), "method"),
        (lambda: SynthesisOptions(rows=0), "rows"),
        (lambda: SynthesisOptions(most_cells=0), "most_cells"),
        (lambda: SynthesisOptions(device="abacus"), "device"),
        (lambda: SynthesisTerms(-1.0), "epsilon"),
        (lambda: SynthesisTerms(1.0, 0.0), "delta"),
        (lambda: SynthesisTerms(1.0, 1e-6, user="id"), "most_records"),
        (lambda: SynthesisTerms(1.0, 1e-6, most_records=3), "most_records"),
        (lambda: SynthesisTerms(1.0, 1e-6, "id", 3, records=9), "records"),
        (lambda: SynthesisTerms(1.0, 1e-6, records=1), "records"),
    ],
)
def test_bad_terms_are_refused_in_words(build, words):
    with pytest.raises(InvalidInput, match=words):
        build()


def test_a_marginal_of_10_to_the_12_cells_is_refused():
    wide = Domain.of({"a": 10_000, "b": 10_000, "c": 10_000})
    with pytest.raises(InvalidInput, match=r"has 1e\+12 cells"):
        plan(wide, TERMS, SynthesisOptions(workload=[["a", "b", "c"]]))


def test_no_records_and_one_record_are_synthesized_as_ever(tmp_path):
    """A refusal would tell how many there are."""
    for count in (0, 1):
        made = synthesize_table(
            people(count),
            schema=DOMAIN,
            terms=TERMS,
            run=tmp_path / str(count),
            options=SynthesisOptions("mst"),
        )
        assert made.facts["rows"] >= 1
        assert all(finding.holds for finding in dpfy.verify(made.run))


def test_public_number_of_records(tmp_path):
    made = synthesize_table(
        people(120),
        schema=DOMAIN,
        terms=SynthesisTerms(1.0, 1e-6, records=120),
        run=tmp_path / "run",
        options=SynthesisOptions("mst"),
    )
    assert made.facts["rows"] == 120
    assert made.report["adjacency"]["name"] == "replace-one"
    with pytest.raises(InvalidInput, match="is not the number of records"):
        synthesize_table(
            people(119),
            schema=DOMAIN,
            terms=SynthesisTerms(1.0, 1e-6, records=120),
            run=tmp_path / "other",
        )
    assert not (tmp_path / "other").exists()


def test_people_with_several_records(tmp_path):
    budget = SynthesisTerms(1.0, 1e-6, user="id", most_records=4)
    made = synthesize_table(
        people(300),
        schema=DOMAIN,
        terms=budget,
        run=tmp_path / "run",
        options=SynthesisOptions("mst"),
    )
    assert made.report["unit"]["name"] == "user"
    assert made.report["unit"]["most_records"] == 4
    alone = plan(DOMAIN, TERMS, SynthesisOptions("mst")).claim
    assert plan(DOMAIN, budget, SynthesisOptions("mst")).claim.length == 4 * alone.length


def test_structural_zeros_and_constraints_hold_in_every_row(tmp_path):
    rules = [
        'rule = "rich = \'no\'"\nwhen = "age < 34"',
        "rule = \"grade >= 'mid'\"\nwhen = \"job = 'cook'\"",
    ]
    domain = Domain.parse(
        SCHEMA + "".join(f"[[constraints]]\n{rule}\n" for rule in rules), "people.toml"
    )
    for method in METHODS:
        made = synthesize_table(
            people(400),
            schema=domain,
            terms=TERMS,
            run=tmp_path / method,
            options=SynthesisOptions(method, rows=500),
        )
        rows = rows_of(made)
        assert not [row for row in rows if int(row["age"]) < 34 and row["rich"] == "yes"]
        assert not [row for row in rows if row["job"] == "cook" and row["grade"] == "low"]
        assert len(rows) == 500  # a forbidden row has no probability: none is left out afterwards


def test_the_private_table_is_refused_as_the_public_one(tmp_path):
    records = people(5)
    write_csv(tmp_path / "people.csv", records)
    (tmp_path / "link.csv").symlink_to(tmp_path / "people.csv")
    for data, public in ((records, records), (tmp_path / "people.csv", str(tmp_path / "link.csv"))):
        with pytest.raises(InvalidInput, match="another table than the private one"):
            synthesize_table(data, schema=DOMAIN, terms=TERMS, run=tmp_path / "run", public=public)
    assert not (tmp_path / "run").exists()


def test_a_public_table_to_start_from_helps(tmp_path):
    errors = []
    for public in (None, people(3000, seed=1)):
        made = synthesize_table(
            people(300),
            schema=DOMAIN,
            terms=SynthesisTerms(0.2, 1e-6),
            run=Run(tmp_path / str(len(errors)), seed=2),
            public=public,
        )
        whole = {c: np.array(people(300)[c]) for c in ("age", "rich")}
        rows = rows_of(made)
        cells = [(a, b) for a in (0, 1) for b in (0, 1)]
        table = [
            np.mean([(int(r["age"]) > 50) == a and (r["rich"] == "yes") == b for r in rows])
            for a, b in cells
        ]
        real = [
            np.mean(((whole["age"].astype(int) > 50) == a) & ((whole["rich"] == "yes") == b))
            for a, b in cells
        ]
        errors.append(float(np.abs(np.array(table) - real).sum()))
    assert errors[1] < 0.5 * errors[0]


def test_the_number_of_rows_is_that_of_what_was_measured(tmp_path):
    """Three secrets give three numbers of rows: that of the records, 50, is told by none."""
    simple, records = (
        Domain.of({"a": 4, "b": 3}),
        {"a": [k % 4 for k in range(50)], "b": [k % 3 for k in range(50)]},
    )
    found = []
    for seed in range(3):
        place = Run(tmp_path / str(seed), seed=seed)
        made = synthesize_table(
            records, schema=simple, terms=TERMS, run=place, options=SynthesisOptions("mst")
        )
        assert abs(made.facts["rows"] - max(1.0, made.facts["records_estimated"])) <= 0.6
        found.append(made.facts["rows"])
    assert len(set(found)) > 1


def test_what_the_folder_holds_is_what_was_released(tmp_path):
    from safetensors.torch import load

    made = synthesize_table(
        people(200),
        schema=DOMAIN,
        terms=TERMS,
        run=tmp_path / "run",
        options=SynthesisOptions("mst"),
    )
    held = load((made.run / "measurements.safetensors").read_bytes())
    assert len(held) == made.facts["measured"]
    assert json.loads((made.run / "synthesis.json").read_text()) == made.facts
    for marginal in made.facts["marginals"]:
        assert 0 <= marginal["off_by_at_most"] <= 2


def test_cells_that_need_quotes_survive(tmp_path):
    text = (
        '[columns.w]\nkind = "category"\ncategories = ["a,b", "say \\"x\\"", '
        '"two\\nlines"]\nrequired = true\n'
    )
    domain = Domain.parse(text, "x.toml")
    made = synthesize_table(
        {"w": ["a,b"] * 300},
        schema=domain,
        terms=SynthesisTerms(5.0, 1e-6),
        run=tmp_path / "run",
        options=SynthesisOptions("mst"),
    )
    assert {row["w"] for row in rows_of(made)} <= {"a,b", 'say "x"', "two\nlines"}
    assert runs.count(made.table, domain, [(0,)]).tables[(0,)][0] > 200
