"""`dpfy ledger show|budget`: what was spent, on what, what is left; every kind of entry, every
broken file, and nothing is changed.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest

from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.cli.app import main
from dpfy.core import events as ev
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Unit
from dpfy.report import spending, spending_page

DELTA = 1e-5
GRAM = tuple(tuple(1.0 if i == j else 0.0 for j in range(4)) for i in range(4))
KINDS: list[tuple[str, ev.Event, int]] = [
    ("statistics of ages", ev.Laplace(4.0), 2),
    ("tuning", ev.RepeatAndSelect(ev.Gaussian(20.0), 10, 1.0), 1),
    ("training a", ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.1)), 200), 1),
    ("vocabulary", ev.EpsilonDelta(0.3, 1e-7), 1),
    ("labels", ev.Zcdp(0.01), 1),
    ("evaluation", ev.Gaussian(9.0), 1),
    ("audit by a response", ev.Composed((ev.DiscreteLaplace(0.2), ev.Nothing())), 1),
]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


def made(path: Path, kinds=KINDS, budget: RenyiFilter | None = None, **claim: object) -> Ledger:
    ledger = Ledger.open(path, budget=budget)
    for name, event, uses in kinds:
        ledger.reserve(name, event, uses, budget=budget, claim={"plan": {"delta": DELTA}} | claim)
    return ledger


def kept(path: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file() and p.suffix != ".svg"
    }


def test_a_ledger_with_seven_kinds_of_entries(capsys, tmp_path):
    ledger = made(tmp_path / "people.jsonl")
    before = kept(ledger.path)
    status, out, _ = call(capsys, "ledger", "show", ledger.path, "--json")
    found = json.loads(out)
    assert status == 0
    assert [row["purpose"] for row in found["entries"]] == [
        "statistics", "tuning", "training", "vocabulary", "labels", "evaluation", "audit"
    ]  # fmt: skip
    assert [row["uses"] for row in found["entries"]] == [2, 1, 1, 1, 1, 1, 1]
    assert all(
        isinstance(row["epsilon"], float) and isinstance(row["total"], float)
        for row in found["entries"]
    )
    totals = [row["total"] for row in found["entries"]]
    assert totals == sorted(totals)
    assert totals[-1] == found["epsilon"]
    assert found["entries"][0]["epsilon"] == pytest.approx(0.5, rel=1e-3)
    assert found["entries"][2]["epsilon"] == accounting.epsilon(KINDS[2][1], DELTA)
    assert (
        max(row["epsilon"] for row in found["entries"])
        <= found["epsilon"]
        <= sum(row["epsilon"] for row in found["entries"]) + 1
    )
    assert found["delta"] == DELTA
    status, out, _ = call(capsys, "ledger", "show", ledger.path)
    assert status == 0
    for word in (
        "statistics",
        "tuning",
        "training",
        "begun",
        "Laplace",
        "200 times",
        "best of",
        "together: epsilon",
        "no budget",
    ):
        assert word in out
    assert kept(ledger.path) == before, "looking changes nothing"


def test_states_and_what_is_given_back_is_not_counted(capsys, tmp_path):
    ledger = Ledger.open(tmp_path / "people.jsonl")
    gaussian = ev.Gaussian(2.0)
    one, two, three = (ledger.reserve(f"training {k}", gaussian, returnable=True) for k in "abc")
    ledger.begin(one)
    ledger.void(two, "refused")
    ledger.reserve("statistics", gaussian)
    ledger.begin(three)
    ledger.reserve("later", gaussian, returnable=True)
    status, out, _ = call(capsys, "ledger", "show", ledger.path, "--delta", 1e-6, "--json")
    found = json.loads(out)
    assert status == 0
    assert [row["state"] for row in found["entries"]] == [
        "begun",
        "given back",
        "begun",
        "begun",
        "open",
    ]
    assert "absent" in found["entries"][1]["total"]
    assert found["epsilon"] == accounting.epsilon(ev.Repeated(gaussian, 4), 1e-6)
    assert (found["delta"], found["delta_of"]) == (1e-6, "--delta")


def test_the_ledger_of_a_finished_run(capsys, tmp_path):
    fast = [
        "--data",
        "digits",
        "--model",
        "linear",
        "--delta",
        "1e-4",
        "--batch-size",
        "200",
        "--steps",
        "3",
    ]
    shared = tmp_path / "people.jsonl"
    out = call(
        capsys,
        "train",
        *fast,
        "--out",
        tmp_path / "run",
        "--ledger",
        shared,
        "--budget",
        9,
        "--json",
    )[1]
    epsilon = json.loads(out)["epsilon"]
    status, out, _ = call(capsys, "ledger", "show", tmp_path / "run" / "ledger.jsonl", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["entries"][0]["state"] == "finished"
    assert found["epsilon"] == epsilon
    assert (found["delta"], found["delta_of"]) == (1e-4, "the reservations")
    status, out, _ = call(capsys, "ledger", "show", shared, "--json")
    found = json.loads(out)
    assert found["epsilon"] == epsilon
    assert found["budget"]["epsilon"] == 9
    assert epsilon <= found["budget"]["spent"] <= 9
    assert found["budget"]["left"] == pytest.approx(9 - found["budget"]["spent"])


def test_the_purpose_of_a_claim_wins_over_the_name(capsys, tmp_path):
    ledger = made(tmp_path / "people.jsonl", KINDS[:1], kind="count", purpose="counting heads")
    assert spending.of(Ledger.read(ledger.path)).entries[0].purpose == "counting heads"
    hostile = made(tmp_path / "other.jsonl", KINDS[:1], purpose="\x1b[2J")
    assert spending.of(Ledger.read(hostile.path)).entries[0].purpose == "statistics"
    for number, said in enumerate(({"a": 1}, ["statistics"], 3, None)):
        strange = made(tmp_path / f"strange-{number}.jsonl", KINDS[:1], purpose=said)
        assert spending.of(Ledger.read(strange.path)).entries[0].purpose == "statistics"


def test_a_release_that_no_accountant_bounds_says_why(capsys, tmp_path):
    kinds = [
        ("training", ev.Repeated(ev.SampledWithoutReplacement(100, 10, ev.Gaussian(1.0)), 5), 1),
        ("statistics", ev.Laplace(2.0), 1),
    ]
    ledger = made(tmp_path / "people.jsonl", kinds)
    status, out, _ = call(
        capsys, "ledger", "show", ledger.path, "--plot", tmp_path / "x.svg", "--json"
    )
    found = json.loads(out)
    assert status == 0
    assert "not supported" in found["entries"][0]["epsilon"]["absent"]
    assert isinstance(found["entries"][1]["epsilon"], float)
    assert "not supported" in found["epsilon"]["absent"]
    status, out, _ = call(capsys, "ledger", "show", ledger.path)
    assert status == 0
    assert "1: no epsilon: tight:" in out
    assert "together: no epsilon" in out


def test_a_release_without_protection_is_infinite(capsys, tmp_path):
    ledger = made(tmp_path / "people.jsonl", [("training", ev.NotPrivate(), 1)])
    status, out, _ = call(
        capsys, "ledger", "show", ledger.path, "--plot", tmp_path / "x.svg", "--json"
    )
    assert status == 0
    assert json.loads(out)["epsilon"] == "infinity"
    assert "infinity" in call(capsys, "ledger", "show", ledger.path)[1]


def test_an_empty_ledger_and_no_delta_anywhere(capsys, tmp_path):
    Ledger.open(tmp_path / "people.jsonl")
    status, _, err = call(capsys, "ledger", "show", tmp_path / "people.jsonl")
    assert status == 2
    assert "--delta" in err
    status, out, _ = call(
        capsys,
        "ledger",
        "show",
        tmp_path / "people.jsonl",
        "--delta",
        1e-6,
        "--json",
        "--plot",
        tmp_path / "x.svg",
    )
    assert status == 0
    assert json.loads(out)["epsilon"] == 0


def test_a_pure_guarantee(capsys, tmp_path):
    """At delta 0, where every claim states it or the user asks for it; a Gaussian has none."""
    pure = made(tmp_path / "pure.jsonl", KINDS[:1], plan={}, delta=0)
    found = json.loads(call(capsys, "ledger", "show", pure.path, "--json")[1])
    assert found["delta"] == 0
    assert found["epsilon"] == pytest.approx(0.5, rel=1e-6)
    both = made(tmp_path / "both.jsonl", KINDS[:1], plan={}, delta=0)
    both.reserve("training", ev.Gaussian(2.0), claim={"plan": {"delta": 1e-6}})
    assert json.loads(call(capsys, "ledger", "show", both.path, "--json")[1])["delta"] == 1e-6
    found = json.loads(call(capsys, "ledger", "show", both.path, "--delta", 0, "--json")[1])
    assert found["epsilon"] == "infinity" or "absent" in found["epsilon"]


def test_the_picture(capsys, tmp_path):
    budget = RenyiFilter(8.0, DELTA)
    gaussians = [(f"training {k} <&>", ev.Gaussian(6.0 + k), 1) for k in range(6)]
    ledger = made(tmp_path / "pe<o>ple.jsonl", gaussians, budget)
    status, out, _ = call(capsys, "ledger", "show", ledger.path, "--plot", tmp_path / "spent.svg")
    assert status == 0
    assert "picture:" in out
    root = tree.fromstring((tmp_path / "spent.svg").read_text())
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("circle") == 6
    assert names.count("polyline") == 3, "composed, as the budget counts, and the budget"
    assert "budget 8" in "".join(root.itertext())
    status, _, err = call(capsys, "ledger", "show", ledger.path, "--plot", tmp_path / "spent.txt")
    assert status == 2
    assert "--plot" in err


def test_a_long_ledger_is_summed_at_some_of_its_entries():
    for length in (1, 10, 22, 100, 1000):
        marks = spending._marks([ev_permit(k) for k in range(length)])
        assert f"{length - 1:016x}" in marks
        assert len(marks) == length or len(marks) * length <= 4 * spending.WORK + length
    assert spending._marks([]) == set()


def test_of_a_long_ledger_the_last_are_shown_by_themselves(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(spending, "OWN", 2)
    monkeypatch.setattr(spending, "WORK", 4)
    ledger = made(
        tmp_path / "people.jsonl", [(f"training {k}", ev.Gaussian(9.0), 1) for k in range(5)]
    )
    found = json.loads(call(capsys, "ledger", "show", ledger.path, "--json")[1])
    assert ["absent" in str(row["epsilon"]) for row in found["entries"]] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert [isinstance(row["total"], float) for row in found["entries"]] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert found["epsilon"] == accounting.epsilon(ev.Repeated(ev.Gaussian(9.0), 5), DELTA)
    assert "no epsilon" not in call(capsys, "ledger", "show", ledger.path)[1]


def ev_permit(k: int):
    from types import SimpleNamespace

    return SimpleNamespace(entry=f"{k:016x}")


@pytest.mark.parametrize(("share", "full"), [(0.0, 0), (1e-9, 1), (0.5, 20), (1.0, 40), (7.0, 40)])
def test_the_bar(share, full):
    assert spending_page.bar(share) == "#" * full + "." * (40 - full)


def test_a_budget_is_made_shown_and_kept(capsys, tmp_path):
    path = tmp_path / "people.jsonl"
    status, out, _ = call(
        capsys, "ledger", "create", path, "--epsilon", 4, "--delta", 1e-5, "--json"
    )
    assert status == 0
    assert json.loads(out)["budget"] == {
        "kind": "renyi",
        "epsilon": 4.0,
        "delta": 1e-5,
        "approximation": 2e-6,
        "spent": 0.0,
        "left": 4.0,
    }
    before = kept(path)
    status, out, _ = call(capsys, "ledger", "create", path, "--epsilon", 4, "--delta", 1e-5)
    assert status == 0
    assert "4.000 left" in out
    assert "2e-06 of delta is set aside for releases that may fail with a small probability" in out
    for words in (["--epsilon", 5, "--delta", 1e-5], ["--epsilon", 4, "--delta", 1e-6]):
        status, _, err = call(capsys, "ledger", "create", path, *words)
        assert status == 2
        assert "a budget is set once" in err
    assert kept(path) == before
    Ledger.open(path).reserve("training", ev.Gaussian(3.0), budget=RenyiFilter(4.0, 1e-5, 2e-6))
    status, out, _ = call(capsys, "ledger", "show", path, "--json")
    assert 0 < json.loads(out)["budget"]["left"] < 4
    assert "error" not in out


def test_a_new_budget_admits_words_that_are_not_public_and_says_where_it_does_not(capsys, tmp_path):
    """Two queries at the delta of the budget, and not where nothing was set aside for them; a
    ledger that an earlier version made keeps what it was made with.
    """
    (tmp_path / "d.csv").write_text("id\n" + "\n".join("ab"[k % 2] for k in range(400)))
    (tmp_path / "s.toml").write_text("[columns.id]\nignore = true\n")
    path, none = tmp_path / "people.jsonl", tmp_path / "none.jsonl"
    asked = ["query", tmp_path / "d.csv", "top(id)", "--schema", tmp_path / "s.toml"]
    asked += ["--epsilon", 1, "--delta", 1e-6]
    call(capsys, "ledger", "create", path, "--epsilon", 8, "--delta", 1e-6)
    for name in ("q", "r"):
        status, out, err = call(capsys, *asked, "--out", tmp_path / name, "--ledger", path)
        assert (status, err) == (0, "")
        assert "budget of the data set" in out
    status, _, err = call(capsys, *asked, "--out", tmp_path / "s", "--ledger", path)
    assert status == 2
    assert "ask with a smaller delta" in err
    Ledger.open(none, budget=RenyiFilter(8.0, 1e-6))
    out = call(capsys, "ledger", "create", none, "--epsilon", 8, "--delta", 1e-6)[1]
    assert "top(), range() and other releases" in out
    assert "are refused" in out
    assert call(capsys, *asked, "--out", tmp_path / "t", "--ledger", none)[0] == 2


def test_the_ledger_of_a_data_set_names_runs_and_says_which_are_finished(capsys, tmp_path):
    (tmp_path / "d.csv").write_text("age\n" + "\n".join(str(k % 90) for k in range(400)))
    (tmp_path / "s.toml").write_text('[columns.age]\nkind = "number"\nrange = [0, 100]\n')
    path = tmp_path / "people.jsonl"
    call(capsys, "ledger", "create", path, "--epsilon", 8, "--delta", 1e-6)
    asked = ["query", tmp_path / "d.csv", "mean(age)", "--schema", tmp_path / "s.toml"]
    asked += ["--epsilon", 1, "--ledger", path, "--out"]
    for name in ("first query", "second"):
        assert call(capsys, *asked, tmp_path / name)[0] == 0
    budget = RenyiFilter(8.0, 1e-6, 2e-7)
    Ledger.open(path).reserve("training", ev.Gaussian(9.0), budget=budget)
    found = json.loads(call(capsys, "ledger", "show", path, "--json")[1])
    assert [row["run"] for row in found["entries"][:2]] == ["first query", "second"]
    assert "absent" in found["entries"][2]["run"], "as lines of earlier versions"
    assert [row["state"] for row in found["entries"]] == ["finished", "finished", "begun"]
    shown = call(capsys, "ledger", "show", path)[1]
    assert "first query" in shown
    assert "is more than" in shown
    assert "chosen by the results of earlier ones" in shown
    verdict = call(capsys, "verify", tmp_path / "second", "--ledger", path)
    assert verdict[0] == 0, verdict


def test_a_budget_that_takes_black_boxes(capsys, tmp_path):
    path = tmp_path / "people.jsonl"
    assert (
        call(
            capsys,
            "ledger",
            "create",
            path,
            "--epsilon",
            4,
            "--delta",
            1e-5,
            "--approximation",
            1e-6,
        )[0]
        == 0
    )
    budget = RenyiFilter(4.0, 1e-5, 1e-6)
    Ledger.open(path).reserve("labels", ev.EpsilonDelta(0.5, 1e-7), budget=budget)
    status, out, _ = call(capsys, "ledger", "show", path)
    assert status == 0
    assert "1e-06 of delta is set aside" in out
    assert 0 < json.loads(call(capsys, "ledger", "show", path, "--json")[1])["budget"]["left"] < 4


def test_a_made_budget_binds_training(capsys, tmp_path):
    path = tmp_path / "people.jsonl"
    call(capsys, "ledger", "create", path, "--epsilon", 1, "--delta", 1e-4)
    fast = [
        "--data",
        "digits",
        "--model",
        "linear",
        "--delta",
        "1e-4",
        "--batch-size",
        "200",
        "--steps",
        "3",
    ]
    status, _, err = call(
        capsys, "train", *fast, "--epsilon", 3, "--out", tmp_path / "run", "--ledger", path
    )
    assert status == 2
    assert "the budget is epsilon 1" in err


def test_a_budget_for_users(capsys, tmp_path):
    path = tmp_path / "people.jsonl"
    words = ["--at-most", 5, "--adjacency", "replace-one"]
    assert call(capsys, "ledger", "create", path, "--epsilon", 4, "--delta", 1e-5, *words)[0] == 0
    ledger = Ledger.read(path)
    assert ledger.unit == Unit("user", 5)
    assert ledger.adjacency.value == "replace-one"
    assert "one user of at most 5 records, replace-one" in call(capsys, "ledger", "show", path)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epsilon", 4], "--delta"),
        (["--delta", 1e-5], "--epsilon"),
        (["--epsilon", 0, "--delta", 1e-5], "--epsilon"),
        (["--epsilon", 4, "--delta", 0], "--delta"),
        (["--epsilon", 4, "--delta", 1e-5, "--unit", ""], "unit.name"),
        (["--epsilon", 4, "--delta", 1e-5, "--approximation", 1e-5], "approximation"),
        (["--epsilon", 4, "--delta", 1e-5, "--adjacency", "x"], "adjacency"),
        ([], "--epsilon"),
        (["--epsilon", 4, "--delta", 1e-5, "--at-most", 0], "--at-most"),
    ],
)
def test_bad_budgets_make_nothing(capsys, tmp_path, words, said):
    status, out, err = call(capsys, "ledger", "create", tmp_path / "people.jsonl", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_in_no_folder_and_one_without_a_budget(capsys, tmp_path):
    status, _, err = call(
        capsys,
        "ledger",
        "create",
        tmp_path / "no" / "people.jsonl",
        "--epsilon",
        1,
        "--delta",
        1e-5,
    )
    assert status == 2
    assert "a folder that exists" in err
    made(tmp_path / "people.jsonl", KINDS[:1])
    status, out, _ = call(capsys, "ledger", "show", tmp_path / "people.jsonl")
    assert status == 0
    assert "no budget" in out
    status, _, err = call(
        capsys, "ledger", "create", tmp_path / "people.jsonl", "--epsilon", 1, "--delta", 1e-5
    )
    assert status == 2
    assert "a budget is set once" in err


def test_broken_files_are_one_line(capsys, tmp_path):
    path = made(tmp_path / "people.jsonl").path
    whole = path.read_bytes()
    for content in (
        b"",
        b"x",
        whole[:-9],
        whole.replace(b"laplace", b"laplacf"),
        b'{"a":' * 5000,
        whole[: len(whole) // 2] + b"\n",
    ):
        path.write_bytes(content)
        for verb in ("show",):
            status, out, err = call(capsys, "ledger", verb, path, "--json")
            assert status == 2
            assert list(json.loads(out)) == ["error"]
            assert err.count("\n") == 1
            assert path.read_bytes() == content
    for other in (tmp_path, tmp_path / "none.jsonl", "/dev/null", "\0"):
        assert call(capsys, "ledger", "show", other)[0] == 2


def test_a_query_that_finds_no_frequent_word_says_so(capsys, tmp_path):
    (tmp_path / "d.csv").write_text("id\n" + "\n".join(map(str, range(50))))
    (tmp_path / "s.toml").write_text("[columns.id]\nignore = true\n")
    asked = ["query", tmp_path / "d.csv", "top(id)", "--schema", tmp_path / "s.toml"]
    asked += ["--epsilon", 0.1, "--delta", 1e-9, "--out", tmp_path / "q"]
    status, out, _ = call(capsys, *asked)
    assert status == 0
    assert out.startswith("no word was frequent enough to be shown")
