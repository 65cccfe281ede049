"""Two tables that belong together: a person adds one record, and visits stay with whom they belong
to.
"""

from __future__ import annotations

import csv

import numpy as np
import pytest

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.runs.run import Run
from dpfy.synthetic.counts import RecordOwners, count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.linked import Link, synthesize_linked

PEOPLE = Domain.parse(
    """
[columns.id]
ignore = true
[columns.sex]
kind = "category"
categories = ["f", "m"]
required = true
""",
    "people.toml",
)
VISITS = Domain.parse(
    """
[columns.id]
ignore = true
[columns.ward]
kind = "category"
categories = ["eye", "ear", "heart"]
required = true
[columns.days]
kind = "number"
range = [0, 9]
[columns.cost]
kind = "number"
range = [0, 9]
fill = 3
[[constraints]]
rule = "cost >= days"
""",
    "visits.toml",
)
LINK = Link(PEOPLE, VISITS, "id", 2)


def hospital(count_, seed=0):
    """Women are seen once, for their eyes; men twice, for their hearts, the second time for longer;
    some have no visit.
    """
    rng = np.random.default_rng(seed)
    people, visits = {"id": [], "sex": []}, {"id": [], "ward": [], "days": [], "cost": []}
    for number in range(count_):
        sex = "fm"[int(rng.integers(0, 2))]
        people["id"].append(f"p{number}")
        people["sex"].append(sex)
        for k in range(0 if rng.random() < 0.2 else 1 if sex == "f" else 2):
            days = int(rng.integers(0, 3)) + 3 * k
            for name, cell in (
                ("id", f"p{number}"),
                ("ward", "eye" if sex == "f" else "heart"),
                ("days", str(days)),
            ):
                visits[name].append(cell)
            visits["cost"].append(str(min(9, days + int(rng.integers(0, 3)))))
    return people, visits


def made_of(tables, place):
    return synthesize_linked(
        *tables,
        schemas=(PEOPLE, VISITS),
        key="id",
        most_visits=2,
        epsilon=20.0,
        delta=1e-6,
        run=place,
        method="mst",
    )


def test_synthetic_visits_go_with_their_people(tmp_path):
    ledger = tmp_path / "people.jsonl"
    found = made_of(hospital(400), Run(tmp_path / "run", ledger=ledger, seed=1))
    assert all(finding.holds for finding in dpfy.verify(found.made.run, ledger=ledger))
    assert found.made.report["guarantee"]["unit"] == "user"
    sex = {row["id"]: row["sex"] for row in found.people}
    assert len(sex) == len(found.people)
    wards = {who: [v["ward"] for v in found.visits if sex[v["id"]] == who] for who in "fm"}
    assert wards["f"].count("eye") > 0.9 * len(wards["f"]) > 50
    assert wards["m"].count("heart") > 0.9 * len(wards["m"]) > 50
    for visit in found.visits:  # the rules of the table of visits hold in each
        assert visit["ward"] in ("eye", "ear", "heart")
        assert not visit["days"] or int(visit["cost"]) >= int(visit["days"])
    files = found.write(tmp_path / "out")
    for file, rows in zip(files, (found.people, found.visits), strict=True):
        with file.open(newline="") as held:
            assert list(csv.DictReader(held)) == rows


def test_a_person_adds_one_record_whatever_the_visits():
    """The wide tables with and without a person of twenty visits and two rows differ by one record
    in every marginal.
    """
    people, visits = hospital(30)
    more = {
        name: [*column, *(["q", "q"] if name == "id" else ["f", "m"])]
        for name, column in people.items()
    }
    cells = {"id": "q", "ward": "ear", "days": "9", "cost": "9"}
    longer = {name: [*[cells[name]] * 20, *column] for name, column in visits.items()}
    cliques = [(k,) for k in range(len(LINK.domain.columns))] + [(0, 1), (1, 2), (2, 5)]
    with_, without = (
        count(LINK.rows(*tables), LINK.domain, cliques, RecordOwners("id", 1)).tables
        for tables in ((more, longer), (people, visits))
    )
    for clique in cliques:
        assert np.abs(with_[clique] - without[clique]).sum() == 1


def test_wide_records_hold_the_first_visits_in_their_order():
    people = {"id": ["a", "b", "a"], "sex": ["f", "m", "m"]}
    visits = {"id": ["b", " a", "b", "b", "x"], "ward": ["eye", "", "ear", "heart", "eye"]}
    visits |= {"days": ["1", "", "2", "3", "4"], "cost": ["", "5", "6", "7", "8"]}
    found = LINK.rows(people, visits)
    assert found["visits"] == [
        "1",
        "2",
        "1",
    ]  # of the third row, a's second, nothing is counted later
    assert found["ward.1"] == [
        "eye",
        "eye",
        "eye",
    ]  # what is missing in a required column is its first cell
    assert found["ward.2"] == [None, "ear", None]
    assert found["days.1"] == ["", "1", ""]
    assert found["cost.1"] == ["5", "3", "5"]  # filled in
    assert found["cost.2"] == [None, "6", None]


def test_nothing_is_read_before_the_bill_is_reserved(tmp_path):
    """A table that is missing is met after planning: the reservation is given back, and nothing is
    spent.
    """
    ledger = tmp_path / "people.jsonl"
    with pytest.raises(DpfyError, match="visits"):
        made_of(
            (hospital(5)[0], str(tmp_path / "visits.csv")), Run(tmp_path / "run", ledger=ledger)
        )
    assert Ledger.read(ledger).spent() == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": "sex"}, "ignore = true"),
        ({"most": 0}, "most_visits"),
    ],
)
def test_bad_links_are_named(change, words):
    with pytest.raises(InvalidInput, match=words):
        Link(**({"people": PEOPLE, "visits": VISITS, "key": "id", "most": 2} | change))
