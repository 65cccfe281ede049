"""The card is complete: the guide's checklist (section 5.3.3), item by item, against the ledger;
and it gives nothing away.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from dpfy import accounting
from dpfy.core import events
from dpfy.core.errors import Unsupported
from dpfy.core.guarantee import Tradeoff
from dpfy.core.ledger import Ledger
from dpfy.plan.recipe import Plan
from dpfy.report import figures, html_page, markdown, words
from dpfy.report.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
import runs


def card_of(run):
    return json.loads((run / "privacy.json").read_text())


def trained(card):
    """The section on training."""
    return next(part for part in card["sections"] if part["kind"] == "training")


def assumed(card):
    return [*card["accounting"]["assumptions"], *trained(card)["assumptions"]]


def value(number):
    return math.inf if number == "infinity" else number


def said(text):
    assert isinstance(text, str)
    assert len(text) > 10, text


def walk(card, ledger, plan):
    """The checklist. Every item is there and agrees with the ledger, computed here without the
    card's own code.
    """
    route = accounting.accountant(plan.accountant)

    def epsilon(permits):
        event = events.Composed(tuple(events.Repeated(p.event, p.uses) for p in permits))
        return route.curve(event, ledger.adjacency).epsilon(plan.delta)

    permits = ledger.permits()
    sampled_as_assumed = (
        next(p.claim["claim"]["batches"] for p in permits if p.name == "training") is None
    )
    # 1: the setting
    assert card["setting"]["model"] == "central"
    said(card["setting"]["words"])
    assert "holds the data must be trusted" in card["setting"]["trusted"]
    # 2a: data accesses covered and not covered
    covered = card["accesses"]["covered"]
    assert [(row["name"], row["uses"]) for row in covered] == [(p.name, p.uses) for p in permits]
    for row, permit in zip(covered, permits, strict=True):
        assert events.CODEC.decode(row["event"]) == permit.event
        assert value(row["epsilon"]) == pytest.approx(epsilon([permit]), rel=1e-6)
        said(row["words"])
    kinds = {row["kind"] for row in covered} | {
        row["kind"] for row in card["accesses"]["not_covered"]
    }
    assert kinds >= {"training", "tuning", "statistics", "vocabulary", "audit"}
    for row in card["accesses"]["not_covered"]:
        assert not any(p.name.startswith(row["kind"]) for p in permits)
        said(row["absent"])
    # 2b: the output of the mechanism
    assert "every noisy step" in trained(card)["released"]
    assert card["boundary"]["name"] == "B4"
    said(card["boundary"]["words"])
    # 2c: the unit, and what of it is protected
    assert (card["unit"]["name"], card["unit"]["most_records"]) == (
        ledger.unit.name,
        ledger.unit.most_records,
    )
    assert card["guarantee"]["unit"] == ledger.unit.name
    assert card["unit"]["protection"] == ledger.unit.protects
    said(card["unit"]["meaning"])
    # 2d: adjacency
    assert card["adjacency"]["name"] == card["guarantee"]["adjacency"] == ledger.adjacency.value
    said(card["adjacency"]["meaning"])
    # 3a: the type of accounting
    assert card["accounting"]["accountant"] == card["guarantee"]["accountant"] == plan.accountant
    said(trained(card)["theorem"])
    # 3b: assumptions, and whether they hold; the guarantee without amplification
    rows = {row["what"]: row for row in assumed(card)}
    assert set(rows) >= {"sampling", "contribution", "noise"}
    assert (rows["sampling"]["holds"] == "yes") == sampled_as_assumed
    assert all(row["holds"] in ("yes", "no", "nearly", "stated") for row in rows.values())
    known = figures.unsampled(ledger.event())
    beside = card["accounting"]["without_amplification"]
    if known == ledger.event():
        said(beside["absent"])
    else:
        assert value(beside["epsilon"]) == pytest.approx(
            route.curve(known, ledger.adjacency).epsilon(plan.delta), rel=1e-6
        )
        assert value(beside["epsilon"]) >= value(card["guarantee"]["epsilon"])
    # 3c: the formal statement, for training and with tuning
    training = [p for p in permits if p.name == "training"]
    tuning = [p for p in permits if p.name.startswith("tuning")]
    assert card["formal"]["training"]["delta"] == card["guarantee"]["delta"] == plan.delta
    assert value(card["formal"]["training"]["epsilon"]) == pytest.approx(
        epsilon(training), rel=1e-6
    )
    assert value(card["guarantee"]["epsilon"]) == pytest.approx(epsilon(permits), rel=1e-6)
    if tuning:
        assert card["formal"]["with_tuning"]["epsilon"] == pytest.approx(
            epsilon(training + tuning), rel=1e-6
        )
    else:
        said(card["formal"]["with_tuning"]["absent"])
    for form in ("zcdp", "gdp", "curve"):
        assert card["formal"][form]
    # 4: transparency and verifiability
    said(card["verification"]["words"])
    assert (
        [body["type"] for body in ledger.bodies].index("finish")
        == card["ledger"]["entries"]
        == len(ledger.bodies) - 1
    )
    assert card["ledger"]["head"] == ledger.chain.heads[-2]
    assert {"plan.json", "model.safetensors"} <= set(card["files"])
    assert card["provenance"]["dpfy"]


def evidence(run):
    return (
        card_of(run),
        Ledger.read(run / "ledger.jsonl"),
        Plan.from_json(json.loads((run / "plan.json").read_text())),
    )


@pytest.mark.parametrize("name", [*runs.FIVE, *runs.MORE])
def test_the_checklist_is_complete_and_agrees_with_the_ledger(made, name):
    run = made(name)
    walk(*evidence(run))
    assert [f for f in verify(run) if not f.holds] == []
    assert [f for f in verify(run / "privacy.json") if not f.holds] == []


ITEMS = [
    ("setting",), ("accesses", "covered"), ("accesses", "not_covered"), ("boundary",), ("sections", 0, "released"),
    ("unit",), ("unit", "protection"), ("adjacency",),
    ("accounting", "accountant"), ("accounting", "assumptions"), ("accounting", "without_amplification"), ("formal", "training"),  # noqa: E501
    ("formal", "with_tuning"), ("formal", "curve"), ("verification",), ("files",), ("ledger",),
]  # fmt: skip


@pytest.mark.parametrize("path", ITEMS, ids=lambda path: ".".join(map(str, path)))
def test_the_walk_fails_where_an_item_is_missing(made, path):
    card, ledger, plan = evidence(made("dp-sgd"))
    place = card
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises((AssertionError, KeyError)):
        walk(card, ledger, plan)


@pytest.mark.parametrize("name", list(runs.FIVE))
def test_every_form_states_every_item(made, name):
    card, page, text = (
        card_of(made(name)),
        (made(name) / "report.html").read_text(),
        (made(name) / "report.md").read_text(),
    )
    for item in ("1", "2a", "2b", "2c", "2d", "3a", "3b", "3c", "4"):
        assert f'<span class="item">{item}</span>' in page
        assert re.search(rf"^\| {item} ", text, re.MULTILINE), item
    from markupsafe import escape

    for statement in (
        card["statement"], card["setting"]["words"], card["setting"]["trusted"], card["boundary"]["words"], trained(card)["released"],  # noqa: E501
        card["unit"]["meaning"], card["adjacency"]["meaning"],
        trained(card)["theorem"], *card["attacker"]["sentences"], *card["warnings"], card["verification"]["words"],
        card["tier"]["why"],
    ):  # fmt: skip
        assert str(escape(statement)) in page
        assert statement in text
    for shown in (page, text):
        assert words.up(card["guarantee"]["epsilon"]) in shown
        assert card["digest"] in shown


def test_correlated_noise_claims_no_amplification(made):
    card = card_of(made("correlated"))
    assert words.is_absent(card["accounting"]["without_amplification"])
    assert trained(card)["mechanism"]["strategy"] == "banded"
    assert "fixed order" in trained(card)["mechanism"]["sampling_words"]
    assert card["formal"]["gdp"]["mu"] == pytest.approx(1 / 3.0, rel=1e-9)


def test_non_poisson_data_has_its_caveat(made):
    assert any("not Poisson samples" in line for line in card_of(made("non-poisson"))["warnings"])
    assert not any("Poisson" in line for line in card_of(made("dp-sgd"))["warnings"])


def test_sampling_that_was_not_done_earns_no_amplification(made):
    """Two participations at noise 2: mu is sqrt(2)/2, whatever the sampling rate in the plan."""
    from dpfy.accounting.gaussian import epsilon

    card = card_of(made("foreign"))
    assert card["guarantee"]["epsilon"] == pytest.approx(
        epsilon(math.sqrt(2) / 2, runs.DELTA), rel=1e-6
    )
    assert card["guarantee"]["epsilon"] > card_of(made("dp-sgd"))["guarantee"]["epsilon"]
    assert (
        card["accesses"]["covered"][0]["epsilon"]
        == card["formal"]["training"]["epsilon"]
        == card["guarantee"]["epsilon"]
    )
    sampling = next(row for row in assumed(card) if row["what"] == "sampling")
    assert sampling["holds"] == "no"
    assert "loader that shuffles" in sampling["done"]
    assert any("without amplification" in line for line in card["warnings"])


def test_without_a_bound_on_participation_every_step_counts(tmp_path):
    from dpfy.accounting.gaussian import epsilon

    card = card_of(runs.foreign(tmp_path / "run", most=None))
    assert card["guarantee"]["epsilon"] == pytest.approx(
        epsilon(math.sqrt(runs.STEPS) / 2, runs.DELTA), rel=1e-6
    )


def test_tuning_costs(made):
    card = card_of(made("tuned"))
    assert card["formal"]["with_tuning"]["epsilon"] > card["formal"]["training"]["epsilon"] * 1.01
    assert card["guarantee"]["epsilon"] == card["formal"]["with_tuning"]["epsilon"]
    assert not any("Tuning is not covered" in line for line in card["warnings"])
    assert any("Tuning is not covered" in line for line in card_of(made("dp-sgd"))["warnings"])


def test_other_runs_on_the_same_data_are_named(made):
    for name, said_so in (
        ("shared", "the data set's own ledger"),
        ("dp-sgd", "no ledger across runs was given"),
    ):
        rows = {
            row["kind"]: row["absent"] for row in card_of(made(name))["accesses"]["not_covered"]
        }
        assert said_so in rows["other runs"]


def test_replaced_layers_are_named(made):
    card = card_of(made("converted"))
    assert trained(card)["components"]["replaced"] == ["BatchNorm1d by GroupNorm"]
    assert trained(card)["components"]["modules"] == {"Linear": 2, "GroupNorm": 1, "ReLU": 1}
    assert trained(card)["components"]["parameters"] == 6 * 8 + 8 + 16 + 8 * 3 + 3
    assert trained(card)["optimizer"]["name"] == "Adam"
    assert words.is_absent(trained(card)["utility"])
    assert words.is_absent(trained(card)["confusion"])
    assert words.is_absent(trained(card_of(made("dp-sgd")))["components"]["replaced"])


def test_confused_classes_are_counted(made):
    card = card_of(made("dp-sgd"))
    counts = trained(card)["confusion"]
    assert [sum(row) for row in counts] == runs.data(4)[1].bincount().tolist()
    right = sum(counts[k][k] for k in range(3)) / runs.RECORDS
    assert right == pytest.approx(trained(card)["utility"]["test_accuracy"])


def test_a_resumed_run_has_the_card_of_an_uninterrupted_one(made):
    resumed, whole = card_of(made("resumed")), card_of(made("dp-sgd"))
    for key in (
        "statement",
        "guarantee",
        "setting",
        "accesses",
        "accounting",
        "formal",
        "tier",
        "attacker",
        "warnings",
    ):
        assert resumed[key] == whole[key], key
    assert trained(resumed)["mechanism"] == trained(whole)["mechanism"]


def test_no_privacy_is_said_loudly(made):
    card, page = card_of(made("no-privacy")), (made("no-privacy") / "report.html").read_text()
    assert card["guarantee"]["epsilon"] == "infinity"
    assert card["tier"]["tier"] == 4
    assert "There is no differential privacy guarantee." in card["warnings"]
    assert "No differential privacy" in page
    assert ".inf" in (made("no-privacy") / "report.md").read_text()


def test_nothing_is_blank(made):
    """Every leaf of every card is a value or a reason."""

    def leaves(value, place=""):
        if isinstance(value, dict):
            for key, part in value.items():
                yield from leaves(part, f"{place}.{key}")
        elif isinstance(value, list):
            for n, part in enumerate(value):
                yield from leaves(part, f"{place}.{n}")
        else:
            yield place, value

    for name in (*runs.FIVE, *runs.MORE):
        for place, leaf in leaves(card_of(made(name))):
            assert leaf is not None or ".claim." in place, (name, place)
            assert leaf != "", (name, place)
            if place.endswith(".absent"):
                said(leaf)


def test_an_attacker_never_does_better_than_the_curve_says(made):
    """The picture's bound against the exact trade-off of a Gaussian mechanism: above it, and close
    to it.
    """
    from scipy.stats import norm

    card = card_of(made("correlated"))
    mu = 1 / 3
    pairs = tuple((row["epsilon"], row["delta"]) for row in card["formal"]["curve"])
    for rate in (0.001, 0.01, 0.1, 0.3, 0.7):
        exact = 1 - norm.cdf(norm.ppf(1 - rate) - mu)
        bound = Tradeoff(pairs).hit_rate(rate)
        assert exact <= bound * (1 + 1e-9)
        assert bound <= exact * 1.1
    assert card["attacker"]["guess_accuracy"] == pytest.approx(norm.cdf(mu / 2), rel=1e-6)


def test_unsampled_events_never_cost_less():
    one = events.Gaussian(2.0)
    cases = [
        events.Repeated(events.PoissonSampled(0.1, one), 50),
        events.Composed((events.PoissonSampled(0.5, one), one)),
        events.TruncatedPoissonGaussian(100, 0.1, 20, 2.0),
        events.BallsInBins(2.0, ((1.0, 0.2), (0.2, 0.8))),
    ]
    for event in cases:
        known = figures.unsampled(event)
        assert figures.amplified(event)
        assert not figures.amplified(known)
        try:
            sampled = accounting.epsilon(event, 1e-5)
        except Unsupported:
            continue  # counted by Monte Carlo only
        assert accounting.epsilon(known, 1e-5) >= sampled


def test_pages_are_functions_of_the_card(made):
    run = made("dp-sgd")
    card = card_of(run)
    assert (
        html_page.render(copy.deepcopy(card), html_page.extras(run))
        == (run / "report.html").read_text()
    )
    assert markdown.render(copy.deepcopy(card)) == (run / "report.md").read_text()


def test_the_page_needs_nothing_else(made):
    page = (made("dp-sgd") / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert page.count("<svg") >= 4
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert "`" not in page


def front_matter(text):
    """The little YAML that the front matter uses: keys with a value, a list of words, or keys one
    level down.
    """
    start, front, body = text.split("---\n", 2)
    assert start == ""
    read, key = {}, ""
    for line in front.splitlines():
        if match := re.fullmatch(r"([a-z_]+):", line):
            key = match[1]
            read[key] = None
        elif match := re.fullmatch(r"- (\S+)", line):
            read[key] = [*(read[key] or []), match[1]]
        elif match := re.fullmatch(r"  ([a-z_]+): (\S.*)", line):
            read[key] = (read[key] or {}) | {match[1]: match[2]}
        else:
            match = re.fullmatch(r"([a-z_]+): (\S.*)", line)
            assert match, line
            read[match[1]] = match[2]
    return read, body


def test_front_matter_says_what_the_card_says(made):
    for name in ("dp-sgd", "no-privacy", "user-level"):
        read, body = front_matter((made(name) / "report.md").read_text())
        assert read["library_name"] == "dpfy"
        assert "differential-privacy" in read["tags"]
        claim, card = read["differential_privacy"], card_of(made(name))
        assert float(claim["epsilon"].lstrip(".")) >= value(card["guarantee"]["epsilon"])
        assert float(claim["delta"]) == card["guarantee"]["delta"]
        assert json.loads(claim["unit"]) == card["unit"]["name"]
        assert body.lstrip().startswith("# Privacy report")


def test_reports_give_nothing_away(tmp_path):
    """No record, no seed, no absolute path: in no form of the card."""
    import numpy as np

    from dpfy.core.randomness import Randomness
    from dpfy.training import config, job

    x, y = runs.data()
    np.savez(tmp_path / "secret_people.npz", x=x.numpy(), y=y.numpy())
    flags = {
        "data.kind": "npz", "data.path": str(tmp_path / "secret_people.npz"), "data.classes": 3, "data.range": (-4.0, 4.0),  # noqa: E501
        "data.test_fraction": 0.2, "privacy.records": 96, "privacy.delta": 1e-3, "model.name": "linear", "training.batch_size": 30.0,  # noqa: E501
        "training.steps": 4,
    }  # fmt: skip
    job.run(config.make({}, flags), tmp_path / "run", seed=77)
    rows = {row["what"]: row for row in card_of(tmp_path / "run")["accounting"]["assumptions"]}
    assert rows["noise"]["holds"] == "no"
    secret = Randomness.for_tests(77).secret
    needles = [secret.hex(), str(tmp_path), os.getcwd(), "secret_people", "insecure_seed"]
    needles += [repr(float(v)) for v in x.flatten()] + [
        f"{float(v):.5g}" for v in x[:20].flatten() if abs(v) > 1e-2
    ]
    for name in ("privacy.json", "report.html", "report.md"):
        text = (tmp_path / "run" / name).read_text()
        for needle in needles:
            assert needle not in text, (name, needle)
        assert not re.search(r"[\"' >]/(home|root|tmp|work|Users|var)/", text), name
        assert (
            "whoever knows it can remove the noise" in text
        )  # that the seed was fixed is said, the seed is not


def attach(run, text):
    (run / "audit.json").write_text(text)
    Ledger.read(run / "ledger.jsonl").attach(["audit.json"])


def test_an_audit_made_later_is_shown(made, tmp_path):
    import shutil

    from dpfy.report.compare import publish

    run = shutil.copytree(made("dp-sgd"), tmp_path / "run")
    audit = {
        "epsilon_lower": 0.123456, "delta": 1e-3, "confidence": 0.95, "method": "one run, 1000 canaries",
        "points": [{"false_positive_rate": 0.1, "true_positive_rate": 0.2}],
    }  # fmt: skip
    attach(run, json.dumps(audit))
    before = (run / "report.html").read_text()
    assert "audit was made before the run ended" in before
    page = publish(run, "html").text
    assert "epsilon is at least 0.123" in page
    assert '<circle class="dot b"' in page
    assert "epsilon is at least 0.123" in publish(run, "md").text
    assert [f for f in verify(run) if not f.holds] == []


def test_an_audit_that_contradicts_the_claim_is_an_alarm(made, tmp_path):
    import shutil

    from dpfy.report.compare import publish

    run = shutil.copytree(made("dp-sgd"), tmp_path / "run")
    attach(run, json.dumps({"epsilon_lower": 50.0}))
    assert "An audit contradicts the claim" in publish(run, "html").text
    assert "An audit contradicts the claim" in publish(run, "md").text
    assert [f.detail[:30] for f in verify(run) if not f.holds] == ["An audit contradicts the claim"]
    attach(run, "{}")
    assert any("audit.json" in f.detail for f in verify(run) if not f.holds)


GUIDE = {
    "US Census Bureau 2022": "used epsilon = 12.2 to release its demonstration data (privacy unit "
    "is a person)",
    "Google Gboard 2022": "Gboard's use of DP for Spanish-language next-word prediction: "
    "device-level DP with epsilon = 8.9 and zero-out "
    "adjacency; derived from rho = 0.81 zCDP",
    "Apple 2016-2022": "collected various data from end users running iOS or macOS using epsilon "
    "ranging from 2 to 16, user-day privacy "
    "unit with add-or-remove adjacency",
    "Microsoft 2021": "mentions (mentioned) using DP with epsilon = 4 covering all contributions "
    "from a user in a six month "
    "window (months), but does not detail any specific production uses of DP ML (no use is "
    "described)",
    "Facebook 2022": "employed epsilon = 2 to quantify the mobility changes of Facebook users "
    "(user-day privacy unit)",
}
"""What the guide says of each deployment (Ponomareva et al. 2023, section 5.2.2)."""


def test_deployments_are_stated_as_the_guide_states_them():
    from dpfy.report.html_page import NOT_STATED, ROWS, SOURCES, table

    assert set(SOURCES) == set(GUIDE)
    assert all(f"{who}: {source}" in table()["words"] for who, source in SOURCES.items())
    for who, source in SOURCES.items():  # the years are those of the row
        assert set(re.findall(r"\d{4}", source)) <= set(re.findall(r"\d{4}", who))
    assert {row["who"] for row in ROWS} == set(GUIDE)
    for row in ROWS:
        said = set(re.findall(r"[\w.]+", GUIDE[row["who"]].lower()))
        for field in ("what", "epsilon", "unit", "adjacency"):
            if row[field] != NOT_STATED:
                words = set(re.findall(r"[\w.]+", row[field].lower())) - {
                    "one",
                    "of",
                    "and",
                    "or",
                    "is",
                    "no",
                }
                assert words <= said, (row["who"], field, words - said)
        assert (row["adjacency"] == NOT_STATED) == ("adjacency" not in said)
