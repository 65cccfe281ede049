"""`dpfy tune` and `dpfy plan tune` as a user meets them: one line, one JSON object, a folder that
verifies, nothing half-written.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import dpfy
from dpfy.report import card as cards
from dpfy.tuning import search as searches

sys.path.insert(0, str(Path(__file__).parent))

from calls import call, refused

FAST = [
    "--data",
    "digits",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--epsilon",
    "3",
    "--set",
    "training.steps=5",
    "--set",
    "training.batch_size=200",
]
OVER = ["--over", "training.learning_rate=0.1..10 log", "--over", "training.clip_norm=[0.3, 1.0]"]
SEEDED = ["--trials", "4", "--law", "geometric", "--insecure-seed", "5"]


def test_tune_then_verify_and_load(capsys, tmp_path):
    status, out, err = call(
        capsys, "tune", *FAST, *OVER, *SEEDED, "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    told = json.loads(out)
    assert 2.9 < told["epsilon"] <= 3
    assert told["training_alone"] < told["epsilon"]
    assert set(told["settings"]) == {"training.learning_rate", "training.clip_norm"}
    assert 0 <= told["test_accuracy"] <= 1
    assert not {"seconds", "trials"} & set(told)
    status, out, _ = call(capsys, "verify", tmp_path / "run", "--json")
    assert status == 0
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f"learning_rate = {told['settings']['training.learning_rate']}" in config
    assert "noise_multiplier = " in config
    model = dpfy.load(tmp_path / "run")
    assert sum(p.numel() for p in model.parameters()) == 650
    status, out, _ = call(capsys, "tune", "--resume", "--out", tmp_path / "run", "--json")
    assert status == 0
    assert json.loads(out) == told


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--model", "mlp", "--set", "model.hidden=[1000000000]", *OVER], "model.name"),
        (["--model", "mlp", "--over", "model.hidden=[[32], [100000, 1000000]]"], "model.name"),
        (
            ["--over", "model.hidden=[[16], [32]]", "--over", "model.name=['mlp', 'linear']"],
            "model.hidden",
        ),
        (["--trials", "1e300", *OVER], "trials"),
        (["--trials", "1e300", "--route", "composition", *OVER], "trials"),
        (["--workers", "1000000000", *OVER], "tune.workers"),
        (["--set", "training.steps=1000000000000000", *OVER], "training.steps"),
        (["--over", "training.steps=[5, 1000000000000000]"], "training.steps"),
        (["--over", "training.steps=[5, 1000000000000]"], "steps: got 1000000000000; must be"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_before_anything_is_reserved(
    capsys, tmp_path, more, named
):
    problem = refused(capsys, "tune", *FAST, *more, "--out", tmp_path / "run")
    assert named in problem
    assert not (tmp_path / "run").exists()


def test_more_workers_than_memory_holds_are_refused_before_anything_is_reserved(
    capsys, tmp_path, monkeypatch
):
    real = os.sysconf
    monkeypatch.setattr(
        os,
        "sysconf",
        lambda name: (1 << 30) // real("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else real(name),
    )
    problem = refused(capsys, "tune", *FAST, *OVER, "--workers", "5", "--out", tmp_path / "run")
    assert "workers: got 5; must be at most 4: each is a process of its own" in problem
    assert not (tmp_path / "run").exists()


def test_a_file_holds_the_whole_search_and_a_person_is_told_what_it_cost(capsys, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        '[data]\nkind = "digits"\n[model]\nname = "linear"\n[privacy]\nepsilon = 3.0\ndelta = '
        "1e-4\n[training]\nsteps = 5\n"
        '[search.training]\nlearning_rate = "0.1..10 log"\nbatch_size = [100, 200]\n[tune]\ntrials '
        '= 3\nroute = "composition"\n'
    )
    status, out, err = call(capsys, "tune", job, "--insecure-seed", 3, "--out", tmp_path / "run")
    assert status == 0, err
    for part in ("training.batch_size = ", "accuracy on test records that no trial was scored "
                                           "on", "Training with tuning satisfies",
                 "training alone",
                 "Without a search", "trials.jsonl", "dpfy verify"):  # fmt: skip
        assert part in out
    assert len((tmp_path / "run" / "trials.jsonl").read_text().splitlines()) == 3
    status, out, _ = call(capsys, "tune", job, "--show-config")
    assert status == 0
    again = tmp_path / "again.toml"
    again.write_text(out)
    status, second, _ = call(capsys, "tune", again, "--show-config")
    assert second == out


def test_public_data_makes_the_search_free_and_the_card_names_it(capsys, tmp_path, monkeypatch):
    (tmp_path / "public.toml").write_text('[data]\nkind = "digits"\ntest_fraction = 0.4\n')
    status, out, err = call(
        capsys,
        "tune",
        *FAST,
        *OVER,
        "--trials",
        2,
        "--public",
        tmp_path / "public.toml",
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert status == 0, err
    told = json.loads(out)
    assert told["epsilon"] == told["training_alone"]
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["public_data"][0]["data"] == "public.toml"
    assert {row["kind"]: row["epsilon"] for row in card["accesses"]["covered"]}["tuning"] == 0
    assert len(cards.section(card, "public-tuning")["trials"]) == 2
    assert not (tmp_path / "run.search").exists()
    status, _, _ = call(capsys, "verify", tmp_path / "run")
    assert status == 0
    assert "is the private data itself" in refused(
        capsys, "tune", *FAST, *OVER, "--public", "digits", "--out", tmp_path / "same"
    )


def test_a_search_that_was_stopped_is_resumed_from_its_folder_alone(capsys, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    noted = searches.Search._note

    def note(self, handle, task):
        noted(self, handle, task)
        raise Killed

    whole = json.loads(
        call(capsys, "tune", *FAST, *OVER, *SEEDED, "--out", tmp_path / "whole", "--json")[1]
    )
    monkeypatch.setattr(searches.Search, "_note", note)
    assert call(capsys, "tune", *FAST, *OVER, *SEEDED, "--out", tmp_path / "run")[0] != 0
    monkeypatch.setattr(searches.Search, "_note", noted)
    assert "unfinished" in refused(capsys, "tune", *FAST, *OVER, *SEEDED, "--out", tmp_path / "run")
    status, out, err = call(capsys, "tune", "--resume", "--out", tmp_path / "run", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["settings"] == whole["settings"]
    assert found["score"] == whole["score"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*FAST], "must name what is searched"),
        ([*FAST, "--over", "training.learning_rate"], "--over"),
        ([*FAST, "--over", "training.learning_rat=1..2"], "did you mean 'learning_rate'"),
        ([*FAST, "--over", "privacy.epsilon=1..2"], "must be a field of training or model"),
        ([*FAST, "--over", "training.batch_size=10..20"], "list its values"),
        ([*FAST, "--over", "training.batch_size=[100, 5000]"], "training.batch_size"),
        ([*FAST, "--over", 'training.clip=["flat", "round"]'], "training.clip"),
        ([*FAST, *OVER, "--route", "free"], "tune.route"),
        ([*FAST, *OVER, "--law", "normal"], "tune.law"),
        ([*FAST, *OVER, "--route", "public"], "tune.public"),
        ([*FAST, *OVER, "--trials", "0"], "tune.trials"),
        ([*FAST, *OVER, "--trials", "1"], "ask for 1 to 100,000"),
        ([*FAST, *OVER, "--workers", "0"], "tune.workers"),
        ([*FAST, *OVER, "--set", "tune.engine=optuna"], "dpfy.integrations.optuna"),
        (
            [*FAST, *OVER, "--set", "privacy.noise_multiplier=1", "--set", "data.test=public"],
            "give epsilon",
        ),
        ([*FAST, *OVER, "--set", "data.test=withheld", "--score", "public"], "not declared public"),
        ([*FAST, *OVER, "--set", "data.test=billed"], "charged evaluation beside a search"),
        ([*FAST, *OVER, "--set", "training.stopping=3"], "end early"),
        (["--resume", *FAST, *OVER], "needs --out"),
        (
            ["plan", "--records", "100", "--delta", "1e-5", "--batch-size", "10", "--steps", "5"],
            "one of them",
        ),
        (
            [
                "plan",
                "--records",
                "100",
                "--delta",
                "1e-5",
                "--batch-size",
                "10",
                "--steps",
                "5",
                "--epsilon",
                "1",
                "--trials",
                "1",
            ],
            "--trials",
        ),
        (
            [
                "plan",
                "--records",
                "100",
                "--delta",
                "2",
                "--batch-size",
                "10",
                "--steps",
                "5",
                "--epsilon",
                "1",
            ],
            "delta",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    out = [] if flags[0] in ("plan", "--resume") else ["--out", tmp_path / "run"]
    assert words in refused(capsys, "tune", *flags, *out)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_plan_says_what_each_way_to_pay_leaves(capsys, tmp_path):
    flags = [
        "--records",
        "4000",
        "--batch-size",
        "400",
        "--steps",
        "5",
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
        "--trials",
        "5",
    ]
    status, out, _ = call(capsys, "plan", "tune", *flags, "--plot", tmp_path / "plan.svg", "--json")
    assert status == 0
    told = json.loads(out)
    rows = {f"{row['route']} {row['law']}".strip(): row for row in told["offers"]}
    assert rows["public"]["noise_ratio"] == rows["none"]["noise_ratio"] == 1
    private = [row["noise_ratio"] for name, row in rows.items() if name not in ("public", "none")]
    assert min(private) > 1
    assert (
        rows["random geometric"]["noise_multiplier"]
        > rows["random logarithmic"]["noise_multiplier"]
    )
    assert rows[told["cheapest"]]["noise_ratio"] == min(private)
    assert told["cheapest"] in rows
    assert (tmp_path / "plan.svg").read_bytes().startswith(b"<?xml")
    status, out, _ = call(capsys, "plan", "tune", *flags)
    assert re.search(r"random poisson +\d", out)


def test_the_plan_prices_a_given_noise(capsys):
    flags = [
        "--records",
        "1000",
        "--batch-size",
        "50",
        "--steps",
        "5",
        "--noise-multiplier",
        "1",
        "--delta",
        "1e-6",
        "--trials",
        "10",
    ]
    status, out, _ = call(capsys, "plan", "tune", *flags, "--json")
    assert status == 0
    told = json.loads(out)
    prices = [row["epsilon"] for row in told["routes"]]
    assert told["cheapest"] == told["routes"][0]["route"]
    assert prices == sorted(prices)


@pytest.mark.parametrize("score", ["held-out", "training"])
def test_users_are_scored_and_held_out_whole(capsys, tmp_path, score):
    """Forty users with six records: the model, the choice and the scores protect a user."""
    rows = [f"p{k % 40:02d},{20 + k % 60},{('no', 'yes')[k % 60 > 30]}" for k in range(240)]
    (tmp_path / "people.csv").write_text("\n".join(["person,age,answer", *rows]) + "\n")
    (tmp_path / "test.csv").write_text(
        "\n".join(["person,age,answer", *(row.replace("p", "q") for row in rows[:60])]) + "\n"
    )
    (tmp_path / "schema.toml").write_text(
        '[columns.person]\nignore = true\n[columns.age]\nkind = "number"\nrange = [18, 90]\n'
        '[columns.answer]\nkind = "label"\nclasses = ["no", "yes"]\n'
    )
    data = [
        "--data",
        "csv",
        "--set",
        f"data.path={tmp_path / 'people.csv'}",
        "--set",
        f"data.schema={tmp_path / 'schema.toml'}",
        "--set",
        "data.user=person",
    ]
    data += [
        "--set",
        f"data.test_path={tmp_path / 'test.csv'}",
        "--set",
        "data.most_records=6",
        "--set",
        "privacy.records=40",
    ]
    options = [
        "--epsilon",
        "3",
        "--delta",
        "1e-4",
        "--model",
        "linear",
        "--set",
        "training.batch_size=10",
        "--set",
    ]
    options += [
        "training.steps=3",
        "--over",
        "training.learning_rate=0.1..1",
        "--route",
        "composition",
        "--trials",
        "2",
    ]
    options += ["--score", score, "--set", "tune.held_out=0.4"]
    command = ["tune", *data, *options, "--insecure-seed", "5"]
    status, out, err = call(capsys, *command, "--out", tmp_path / "random")
    assert status == 0, err
    of = {"held-out": "16 users held out", "training": "40 users trained on"}[score]
    said = f"of about {of} that are answered right, each with the share of their records"
    assert said in next(line for line in out.splitlines() if line.startswith("score"))
    assert all(f.holds for f in dpfy.verify(tmp_path / "random"))
    single = ["--set", "data.draw=record"]
    if score == "held-out":
        assert "draw whole users" in refused(
            capsys, *command, *single, "--out", tmp_path / "single"
        )
    status, out, err = call(
        capsys, *command, "--set", "data.pick=first", "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    told = json.loads(out)
    assert told["epsilon"] <= 3
    assert "user" in told["unit"]
    claim = json.loads((tmp_path / "run" / "search.json").read_text())
    assert claim["score"]["sensitivity"] == 100  # a user's share of right answers, in hundredths
    assert call(capsys, "verify", tmp_path / "run", "--json")[0] == 0
