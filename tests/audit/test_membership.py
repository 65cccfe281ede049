"""Membership inference: it finds an overfitted model, does not find a private one, raises no false
alarm, and bounds epsilon only where coins chose the members.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import dpfy
from dpfy.audit import membership, shadows, whitebox
from dpfy.audit.bounds import TrialScores
from dpfy.cli import app
from dpfy.core.errors import InvalidInput, Unsupported

RECORDS, WIDTH = 300, 20


def main(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(words)
    return int(ended.value.code or 0)


def records(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A third of the labels is wrong: only memory can know them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    wrong = torch.rand(count, generator=generator) < 1 / 3
    return x, ((x[:, 0] > 0) ^ wrong).long()


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def overfitted(x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    net = network()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(80):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    return net


def test_an_overfitted_model_is_detected_and_a_private_one_is_not(tmp_path):
    torch.manual_seed(0)
    members, others = records(RECORDS, 1), records(RECORDS, 2)
    plain = shadows.attack_model(
        overfitted(*members).eval(), members, others, train=overfitted, shadows=6
    )
    best = max(result.rates[0].low for result in plain.attacks)
    assert plain.detected
    assert best > 0.05
    assert {result.name for result in plain.attacks} == {
        "threshold",
        "quantile",
        "likelihood ratio",
        "likelihood ratio, offline",
        "relative likelihood",
    }
    net = network()
    result = dpfy.fit(
        net,
        members,
        records=RECORDS,
        epsilon=1.0,
        delta=1e-5,
        batch_size=100,
        steps=20,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        run=dpfy.Run(tmp_path / "run", seed=1),
    )
    private = shadows.attack_model(
        net.eval(), members, others, train=overfitted, shadows=6, claimed=result.epsilon
    )
    assert not private.detected
    assert all(r.low < 0.05 for result in private.attacks for r in result.rates)


def test_shadow_models_come_in_pairs_that_share_no_record():
    x, y = records(60, 3)
    seen: list[set[tuple[float, ...]]] = []

    def train(part, labels):
        seen.append({tuple(row.tolist()) for row in part})
        return torch.nn.Linear(WIDTH, 2)

    margins, trained = shadows.train_shadows(train, x, y, 4)
    assert margins.shape == trained.shape == (4, 60)
    assert (trained[0] ^ trained[1]).all()
    assert (trained[2] ^ trained[3]).all()
    assert not (trained[0] == trained[2]).all()
    for rows, chosen in zip(seen, trained, strict=True):
        assert rows == {tuple(row.tolist()) for row in x[torch.from_numpy(chosen)]}


def test_random_scores_raise_no_more_alarms_than_the_confidence_allows():
    rng, alarms, violated, shifted = np.random.default_rng(4), 0, 0, 0
    for _ in range(200):
        coins, rows = rng.random(400) < 0.5, rng.normal(size=(400, 3))
        found = membership.attack(
            rng.normal(size=400), coins, records=rows, random=True, claimed=0.01
        )
        alarms += found.detected
        violated += found.violated
        shifted += found.shifted
    assert max(alarms, violated, shifted) <= 24  # 10 expected at most; P(24) is below 1e-4


@pytest.mark.parametrize("score", [0.0, 1e300, -5.0])
def test_equal_scores_certify_nothing_however_the_records_are_ordered(score):
    for coins in (np.arange(200) < 100, np.arange(200) >= 100):
        found = membership.attack(np.full(200, score), coins, random=True)
        assert found.bound is not None
        assert found.bound.epsilon < 0.3
        assert not found.detected


def test_a_bound_needs_coins():
    rng = np.random.default_rng(5)
    coins = rng.random(1000) < 0.5
    scores = rng.normal(4.0 * coins, 1.0)
    assert membership.attack(scores, coins).bound is None
    found = membership.attack(scores, coins, random=True, claimed=1.0)
    assert found.bound is not None
    assert found.bound.epsilon > 2
    assert found.violated
    chosen = np.arange(1000) < 700
    with pytest.raises(InvalidInput, match="fair coins"):
        membership.attack(scores, chosen, random=True)


def test_randomised_response_is_bounded_by_its_epsilon():
    rng, epsilon, above = np.random.default_rng(6), 1.0, 0
    for _ in range(100):
        coins = rng.random(500) < 0.5
        said = coins ^ (rng.random(500) > math.exp(epsilon) / (1 + math.exp(epsilon)))
        found = membership.attack(
            said + 1e-6 * rng.random(500), coins, random=True, claimed=epsilon, delta=1e-9
        )
        assert found.bound is not None
        above += found.violated
    assert above <= 12  # 5 expected at most


def test_rates_are_counts():
    scores = TrialScores(np.array([3.0, 2.0, 1.0, -1.0]), np.array([2.5, 0.0, 0.0, -2.0]))
    found = membership.rate_at(scores, 0.25, 0.95)
    assert (found.false_positive, found.true_positive) == (0.25, 0.75)
    auc, low, high = membership.area(scores, 0.95)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores.inside for b in scores.outside]
    assert auc == pytest.approx(np.mean(pairs))
    assert low < auc < high


def test_relative_likelihood_orders_records_as_its_pairs_do():
    """The score of Zarifzadeh et al. is the share of the population whose ratio is not larger."""
    rng = np.random.default_rng(7)
    target, others = np.log(rng.random(40)), np.log(rng.random((6, 40)))
    ratio = np.exp(target) / np.exp(others).mean(0)
    pairs = (ratio[:, None] >= ratio[None]).mean(1)
    found = membership.relative_likelihood(target, others)
    assert (np.argsort(found) == np.argsort(pairs)).all()


def test_members_that_differ_without_the_model_are_said_to():
    rng = np.random.default_rng(8)
    coins = np.arange(600) % 2 == 0
    rows = rng.normal(size=(600, 5)) + 1.0 * coins[:, None]
    found = membership.attack(rng.normal(size=600), coins, records=rows)
    assert found.shifted
    assert any("differ by themselves" in line for line in found.sentences())
    same = membership.attack(rng.normal(size=600), coins, records=rng.normal(size=(600, 5)))
    assert not same.shifted


def test_margins_are_those_of_the_logits():
    x, y = records(50, 9)
    net = network().eval()
    with torch.no_grad():
        p = net(x).double().softmax(1)[torch.arange(50), y].numpy()
    margins = shadows.margins_of(net, x, y)
    assert margins == pytest.approx(np.log(p / (1 - p)), abs=1e-4)
    assert membership.log_probability(margins) == pytest.approx(np.log(p), abs=1e-4)
    assert whitebox.margin([[0.0, 2.0]], [1]) == pytest.approx([2.0])


def cannot(what: str):
    return pytest.raises(InvalidInput, match=what)


def test_bad_input_is_one_line():
    x, y = records(40, 1)
    net = network()
    with cannot("others: record"):
        shadows.attack_model(net, (x, y), (x[:, :3], y))
    with cannot("members"):
        shadows.attack_model(net, (x[:5], y[:5]), (x, y))
    with cannot("one class for each"):
        shadows.attack_model(net, (x, y.float()), (x, y))
    with cannot("classes seen"):
        shadows.attack_model(net, (x, y + 5), (x, y))
    with cannot("pairs"):
        shadows.attack_model(net, (x, y), (x, y), train=overfitted, shadows=3)
    with cannot("train"):
        shadows.attack_model(net, (x, y), (x, y), shadows=2)
    with cannot("finite"):
        membership.attack(np.full(60, np.nan), np.arange(60) % 2)
    with cannot("one for each margin"):
        membership.attack(np.zeros(60), np.arange(60) % 2, records=np.zeros((5, 2)))
    with cannot("margins"):
        membership.attack(np.zeros(60), np.zeros(59))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on arrays of a file, and files of its records and of others."""
    place = tmp_path_factory.mktemp("members")
    for name, seed in (("members", 1), ("others", 2)):
        x, y = records(RECORDS, seed)
        np.savez(place / f"{name}.npz", x=x.numpy(), y=y.numpy())
    job = place / "job.toml"
    job.write_text(
        f'[data]\nkind = "npz"\npath = "{place / "members.npz"}"\nclasses = 2\n'
        f'test_path = "{place / "others.npz"}"\n[model]\nname = "linear"\n'
        f"[training]\nsteps = 5\nbatch_size = 60\n[privacy]\nepsilon = 1.0\nrecords = {RECORDS}\n"
    )
    assert main(["train", str(job), "--out", str(place / "run"), "--insecure-seed", "1"]) == 0
    return place


def test_the_command_attacks_a_run_by_files(trained, capsys):
    files = [f"--{name}={trained / name}.npz" for name in ("members", "others")]
    capsys.readouterr()
    out = trained / "found.json"
    code = main(["audit", "model", str(trained / "run"), *files, "--shadows", "2", "--json",
                 "--out", str(out)])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["members"] == told["others"] == RECORDS
    assert told["bound"] == membership.NO_BOUND
    assert not told["may_be_published"]
    assert 0.9 < told["epsilon_claimed"] <= 1.0
    assert json.loads(out.read_text()) == told
    found = [rate for attack in told["attacks"] for rate in attack["rates"]]
    assert all(rate["most"] >= rate["false_positive_most"] for rate in found)
    assert not (trained / "run" / "membership.json").exists()
    assert main(["audit", "model", str(trained / "run"), *files]) == 0
    assert shadows.KEEP in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--members"),
        (["--members={members}"], "--others"),
        (["--members={members}", "--others={none}"], "none.npz"),
        (["--members={members}", "--others={others}", "--shadows=3"], "even"),
        (["--members={members}", "--others={few}", "--random"], "coins"),
    ],
)
def test_the_command_refuses_in_one_line(trained, options, said, capsys):
    x, y = records(40, 4)
    np.savez(trained / "few.npz", x=x.numpy(), y=y.numpy())
    names = {name: trained / f"{name}.npz" for name in ("members", "others", "none", "few")}
    given = [option.format(**names) for option in options]
    capsys.readouterr()
    assert main(["audit", "model", str(trained / "run"), *given]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_run_by_itself_gets_the_attack_that_fits_it(trained, tmp_path, capsys):
    run = str(trained / "run")
    assert main(["audit", run]) == 2
    assert "dpfy audit train" in capsys.readouterr().err
    files = [f"--{name}={trained / name}.npz" for name in ("members", "others")]
    assert main(["audit", run, *files, "--minutes", "1e-9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shadow_models"] == 2  # the first pair is always trained
    assert "canaries" in told["not_tried"]
    dpfy.query(
        {"age": [30.0, 41.0]}, "sum(age)", epsilon=1.0, delta=0, run=tmp_path / "ages",
        schema=[dpfy.Number("age", 0, 100)],
    )  # fmt: skip
    assert main(["audit", str(tmp_path / "ages")]) == 2
    error = capsys.readouterr().err.strip()
    assert "kind 'query'" in error
    assert len(error.splitlines()) == 1


def test_a_language_model_is_refused_with_a_way_out(tmp_path, monkeypatch):
    attacked = shadows.AttackedRun(tmp_path)
    config = type("Config", (), {"data": type("Data", (), {"kind": "text"})()})()
    monkeypatch.setattr(
        shadows.AttackedRun, "released", type("R", (), {"config": lambda self: config})()
    )
    with pytest.raises(Unsupported, match="canaries"):
        _ = attacked.config
