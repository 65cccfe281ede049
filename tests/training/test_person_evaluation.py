"""Private evaluation where a person with several records is the unit: each person counts once."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.data import config as data_config
from dpfy.data import source
from dpfy.data.given import as_source
from dpfy.data.records import as_records
from dpfy.training import config, evaluation, job
from dpfy.training.objective import Objective

sys.path.insert(0, str(Path(__file__).parent))
import small

UNIT = dpfy.Unit("user", 3)
OWNERS = torch.arange(200) % 50


def net(features: int = small.FEATURES) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(features, 3)


def plan(**more):
    return dpfy.dpsgd(50, 25, steps=2, unit=UNIT, **more).with_noise(2.0, delta=1e-3)


def fitted(path, test, *, records=None, chosen=None, **more):
    model, x = net(), small.data()
    return dpfy.fit(
        model,
        x if records is None else records,
        user=OWNERS,
        plan=chosen or plan(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        run=dpfy.Run(path, seed=3),
        evaluation=test,
        **more,
    )


@torch.no_grad()
def sums(test, aim=None, most=None):
    """What an evaluation adds up before its noise: counts, then cells of the table of classes."""
    opened = Evaluated(net())
    aim = aim or Objective()
    read = as_source(evaluation.by_unit(test, plan().recipe))
    if most is not None:
        return evaluation._bounded_losses(opened, read, aim, most)
    table, counts = evaluation._answered(opened, read, aim)
    assert counts is not None
    return counts if table is None else torch.cat([counts, table.flatten()])


class Evaluated:
    """A model to evaluate, as `PrivateTraining` holds it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.device = model, "cpu"

    def averaged(self):
        return contextlib.nullcontext()


def tokens(seed):
    """Sequences of four targets each, whose outputs are of one linear layer."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(60, 4, small.FEATURES, generator=rng), torch.randint(
        0, 3, (60, 4), generator=rng
    )


@pytest.mark.parametrize("kind", ["classes", "tokens", "losses"])
@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("seed", range(4))
def test_a_person_moves_the_counts_by_at_most_what_one_record_does(kind, rows, seed):
    """One person removed, with 1, at most k and 50 records: L1 at most 1 for the counts and for the
    table each; all others count as before.
    """
    rng = np.random.default_rng(seed)
    owners = np.concatenate([np.full(rows, 7), rng.integers(100, 115, 60)])
    order = rng.permutation(len(owners))
    owners = owners[order]
    if kind == "tokens":
        x, y = (t[torch.from_numpy(rng.integers(0, 60, len(owners)))] for t in tokens(seed))
        aim, most = Objective("tokens"), None
    else:
        x = torch.from_numpy(rng.normal(size=(len(owners), small.FEATURES)) * 10).float()
        y = torch.from_numpy(rng.integers(-1 if kind == "losses" else 0, 3, len(owners)))
        y = y.clamp(min=0)
        aim, most = Objective(), 2.0 if kind == "losses" else None
    keep = torch.from_numpy(owners != 7)
    whole = sums(dpfy.PrivateTest((x, y), user=owners), aim, most)
    without = sums(dpfy.PrivateTest((x[keep], y[keep]), user=owners[keep.numpy()]), aim, most)
    moved = whole - without
    assert (moved >= 0).all()
    assert float(moved[:2].sum()) <= 1.0
    assert float(moved[2:].sum()) <= 1.0
    assert float(moved.norm()) <= evaluation.ONE_RECORD
    assert float(moved.norm()) > 0
    people = len(set(owners.tolist()))
    assert float(whole[:2].sum()) == pytest.approx(people, abs=1e-5)


def test_a_person_counts_with_the_mean_over_their_first_records():
    model = net()
    x, y = small.data()
    owners = torch.tensor([0] * 5 + [1] + [2] * 2)
    right = (model(x[:8]).argmax(1) == y[:8]).double()
    due = float(right[:3].mean() + right[5] + right[6:8].mean())
    for given in (owners, dpfy.Users(owners), dpfy.Users([f"p{k}" for k in owners.tolist()])):
        counts = sums(dpfy.PrivateTest((x[:8], y[:8]), user=given))
        assert float(counts[0]) == pytest.approx(due, abs=1e-6)
        assert float(counts[:2].sum()) == pytest.approx(3, abs=1e-6)
    grouped = dpfy.by_user((x[:8], y[:8]), owners, 3)
    assert float(sums(dpfy.PrivateTest(grouped))[0]) == pytest.approx(due, abs=1e-6)


def test_which_records_count_depends_on_the_person_alone():
    """With pick="random" too: a person less changes nothing for the others."""
    x, y = small.data()
    owners = torch.arange(200) // 10
    read = [
        as_source(
            evaluation.by_unit(
                dpfy.PrivateTest((x[kept], y[kept]), user=dpfy.Users(owners[kept])), plan().recipe
            )
        )
        for kept in (owners >= 0, owners > 0)
    ]
    whole, without = (r.take(torch.arange(len(r)))[0] for r in read)
    assert torch.equal(whole[1:], without)


def test_the_guarantee_of_a_run_covers_its_evaluation_of_persons(tmp_path):
    x, y = small.data()
    test = dpfy.PrivateTest((x[:90], y[:90]), user=torch.arange(90) % 30, noise_multiplier=4.0)
    found = fitted(tmp_path / "run", test)
    assert set(found.utility) == {"test_accuracy", "test_accuracy_noise"}
    card = small.card_of(tmp_path / "run")
    assert card["evaluation"]["noise_multiplier"] == 4.0
    assert "One user counts once" in card["evaluation"]["words"]
    assert card["statement"].startswith("Training with evaluation satisfies")
    assert "user" in card["guarantee"]["unit"]
    told = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert [p.name for p in told.permits()] == ["training", "evaluation"]
    assert told.unit == UNIT
    assert all(f.holds for f in dpfy.verify(tmp_path / "run")), dpfy.verify(tmp_path / "run")
    assert "counts once" in (tmp_path / "run" / "report.md").read_text()


def test_the_accuracy_is_that_of_people_within_its_noise(tmp_path):
    """With hardly any noise the released figure is the mean over people, not over records."""
    model = net()
    with torch.no_grad():  # answers class 0 for a large first feature, else class 1
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 0.5, -9.0]))
        model.weight[0, 0] = 1.0
    x = torch.zeros(104, small.FEATURES)
    x[:100, 0] = 5.0
    y = torch.ones(104, dtype=torch.int64)  # the first person's 100 records are all wrong
    owners = torch.tensor([0] * 100 + [1, 2, 3, 4])
    read = as_source(evaluation.by_unit(dpfy.PrivateTest((x, y), user=owners), plan().recipe))
    _, counts = evaluation._answered(Evaluated(model), read, Objective())
    assert counts.tolist() == [4.0, 1.0]


def test_a_bounded_loss_of_persons_is_released(tmp_path):
    x, y = small.data()
    test = dpfy.PrivateTest((x, y), user=OWNERS, noise_multiplier=0.01, bound=3.0)
    found = fitted(tmp_path / "run", test)
    assert 0 < found.utility["test_loss"] < 3


def test_records_of_the_test_data_that_are_not_by_person_are_refused(tmp_path):
    x, y = small.data()
    with pytest.raises(InvalidInput, match="PrivateTest\\(data, user="):
        fitted(tmp_path / "a", dpfy.PrivateTest((x, y)))
    with pytest.raises(InvalidInput, match="owns up to 3"):
        fitted(tmp_path / "b", dpfy.PrivateTest(dpfy.by_user((x, y), OWNERS, 4)))
    with pytest.raises(InvalidInput, match="grouped by user already"):
        fitted(tmp_path / "c", dpfy.PrivateTest(dpfy.by_user((x, y), OWNERS, 3), user=OWNERS))
    model = net()
    with pytest.raises(InvalidInput, match="give the recipe unit"):
        dpfy.fit(
            model,
            (x, y),
            plan=dpfy.dpsgd(200, 25, steps=2).with_noise(2.0, delta=1e-3),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            run=tmp_path / "d",
            evaluation=dpfy.PrivateTest((x, y), user=OWNERS),
        )
    with pytest.raises(InvalidInput, match="one by one"):
        fitted(tmp_path / "e", dpfy.PublicTest(dpfy.by_user((x, y), OWNERS, 3)))
    days = dpfy.Users(OWNERS, time=torch.arange(200) * 86400, window="day")
    with pytest.raises(InvalidInput, match="give the recipe unit"):
        fitted(tmp_path / "f", dpfy.PrivateTest((x, y), user=days))
    assert not any((tmp_path / name).exists() for name in "abcdef")


def test_records_drawn_one_by_one_are_evaluated_by_person_too(tmp_path):
    x, y = small.data()
    drawn = dpfy.dpsgd(150, 25, steps=2, unit=UNIT, draw="record").with_noise(2.0, delta=1e-3)
    test = dpfy.PrivateTest((x, y), user=OWNERS, noise_multiplier=3.0)
    found = fitted(tmp_path / "run", test, chosen=drawn)
    assert "test_accuracy" in found.utility
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_other_people_after_a_crash_are_refused(tmp_path, monkeypatch):
    x, y = small.data()
    test = dpfy.PrivateTest((x, y), user=OWNERS, noise_multiplier=3.0)
    with monkeypatch.context() as patched:
        patched.setattr(dpfy.PrivateTraining, "finish_measured", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fitted(tmp_path / "run", test)
    model = net()
    moved = dpfy.PrivateTest((x, y), user=OWNERS.roll(1), noise_multiplier=3.0)
    with pytest.raises(InvalidInput, match="test"):
        dpfy.fit(
            model,
            (x, y),
            user=OWNERS,
            plan=plan(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            run=dpfy.Run(tmp_path / "run", seed=3, resume=True),
            evaluation=moved,
        )


def table(folder, people=60, rows=5):
    """A file of people with `rows` rows each, a schema, and settings that train on it."""
    rng = np.random.default_rng(1)
    with open(folder / "people.csv", "w") as file:
        out = csv.writer(file)
        out.writerow(["person", "age", "answer"])
        for k in range(people * rows):
            age = int(rng.integers(18, 90))
            out.writerow([f"p{k % people:03d}", age, "yes" if age > 50 else "no"])
    (folder / "schema.toml").write_text(
        '[columns.person]\nignore = true\n[columns.age]\nkind = "number"\nrange = [18, 90]\n'
        '[columns.answer]\nkind = "label"\nclasses = ["no", "yes"]\n'
    )
    return {
        "data.kind": "csv", "data.path": str(folder / "people.csv"), "data.schema": str(folder / "schema.toml"),
        "data.user": "person", "data.most_records": 3, "data.test": "billed", "data.test_fraction": 0.3,
        "privacy.delta": 1e-3, "model.name": "linear", "training.batch_size": 10.0, "training.steps": 4,
    }  # fmt: skip


@pytest.mark.parametrize("pick", ["first", "random"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_job_evaluates_by_person(tmp_path, pick, apart):
    flags = table(tmp_path) | {"data.pick": pick, "privacy.epsilon": 2.0}
    if apart:
        flags["data.test_path"] = flags["data.path"]
    found = source.load(config.make({}, flags | {"privacy.records": 60}).data)
    assert found.held is not None
    assert len(found.test) == len(as_records(found.held.records))
    flags["privacy.records"] = found.units
    job.run(config.make({}, flags), tmp_path / "run", seed=3)
    card = small.card_of(tmp_path / "run")
    assert 1.9 < card["guarantee"]["epsilon"] <= 2.0
    assert "counts once" in card["evaluation"]["words"]
    assert set(card["utility"]) == {"test_accuracy", "test_accuracy_noise"}
    assert all(f.holds for f in dpfy.verify(tmp_path / "run")), dpfy.verify(tmp_path / "run")


def test_arrays_with_a_part_of_their_own_are_evaluated_by_person(tmp_path):
    x, y = (t.numpy() for t in small.data())
    whose = (np.arange(200) % 40).astype(np.int64)
    np.savez(
        tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:80], y_test=y[:80],
        who_train=whose, who_test=whose[:80],
    )  # fmt: skip
    chosen = data_config.DataConfig(
        kind="npz", path=str(tmp_path / "a.npz"), classes=3, range=(-4.0, 4.0), user="who",
        most_records=2, test="billed",
    )  # fmt: skip
    found = source.load(chosen)
    assert found.held is not None
    assert len(found.held.grouped(found.test)) == 40
    assert len(found.test) == 80
    assert max(Counter(np.asarray(found.held.users.of).tolist()).values()) == 2


def test_a_person_is_held_out_whole_by_a_hash_of_their_own(tmp_path):
    """Removing a person leaves everybody else on their side."""
    flags = table(tmp_path)
    chosen = config.make({}, flags | {"privacy.records": 60}).data
    text = (tmp_path / "people.csv").read_text().splitlines()

    def sides():
        found = source.load(chosen)
        assert found.held is not None
        assert found.owned is not None
        return [set(np.asarray(o.users.of).tolist()) for o in (found.held, found.owned)]

    whole = sides()
    assert not whole[0] & whole[1]
    assert len(whole[0] | whole[1]) == 60
    for person in ("p000", "p001", "p059"):
        kept = [line for line in text if not line.startswith(person)]
        (tmp_path / "people.csv").write_text("\n".join(kept) + "\n")
        assert sides() == [side - {person} for side in whole]


def test_the_writers_of_the_test_images_of_mnist_are_not_read():
    with pytest.raises(InvalidInput, match="say public"):
        data_config.DataConfig(kind="mnist", user="writer", most_records=8, test="billed")
