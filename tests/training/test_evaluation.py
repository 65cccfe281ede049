"""What is told about held-out records: declared public, billed with noise, or withheld; never
anything else.
"""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpfy
from dpfy import accounting
from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.core.unit import EXAMPLE
from dpfy.core.values import mock_permit
from dpfy.data.records import Records
from dpfy.noise.stream import NoiseStream
from dpfy.report import card as cards
from dpfy.report import uses
from dpfy.training import Result, config, evaluation, fit, job
from dpfy.training.run import TrainingRun

sys.path.insert(0, str(Path(__file__).parent))
import small


@pytest.fixture
def table(tmp_path) -> dict[str, object]:
    """A job on a private file of 200 records."""
    x, y = small.data()
    np.savez(tmp_path / "people.npz", x=x.numpy(), y=y.numpy())
    return {
        "data.kind": "npz", "data.path": str(tmp_path / "people.npz"), "data.classes": 3, "data.range": (-4.0, 4.0),
        "privacy.records": 160, "privacy.delta": 1e-3, "model.name": "linear", "training.batch_size": 40.0, "training.steps": 4,  # noqa: E501
    }  # fmt: skip


def run(path: Path, flags: dict[str, object], **more: object) -> dict[str, object]:
    """The card of the job."""
    job.run(
        config.make({}, flags | {k.replace("__", "."): v for k, v in more.items()}), path, seed=3
    )
    return small.card_of(path)


def test_a_file_of_the_users_own_is_not_measured_unless_it_is_declared(table, tmp_path):
    card = run(tmp_path / "run", table)
    assert card["evaluation"]["test"] == "withheld"
    assert set(card["utility"]) == set(card["confusion"]) == {"absent"}
    assert "withheld" in card["utility"]["absent"]
    for name in ("metrics.jsonl", "privacy.json", "report.md", "report.html"):
        text = (tmp_path / "run" / name).read_text()
        assert "on public test data" not in text
        if name != "report.html":  # where a caption says that there are no such rows
            assert "test_accuracy" not in text
            assert "test_loss" not in text
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_test_data_that_is_declared_public_is_measured_exactly_and_the_card_says_whose_word_it_is(
    table, tmp_path
):
    card = run(tmp_path / "run", table, data__test="public")
    assert card["evaluation"] == {"test": "public", "words": uses.WORDS["public"]}
    assert "declared public, by the user" in card["evaluation"]["words"]
    assert sum(map(sum, card["confusion"])) == 40
    for name in ("report.md", "report.html"):
        assert "declared public, by the user" in (tmp_path / "run" / name).read_text()
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_public_data_sets_are_public():
    for kind, use in (
        ("embedded", "public"),
        ("digits", "public"),
        ("mnist", "public"),
        ("adult", "public"),
    ):
        assert config.DataConfig(kind=kind).test_use == use
    assert config.DataConfig(kind="text", path="x").test_use == "withheld"
    assert config.DataConfig(kind="digits", test="withheld").test_use == "withheld"


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_a_billed_evaluation_is_part_of_the_guarantee(table, tmp_path, adjacency):
    card = run(
        tmp_path / "run",
        table,
        data__test="billed",
        privacy__epsilon=2.0,
        privacy__adjacency=adjacency,
    )
    assert 1.9 < card["guarantee"]["epsilon"] <= 2.0
    assert card["formal"]["training"]["epsilon"] < card["guarantee"]["epsilon"]
    assert card["statement"].startswith("Training with evaluation satisfies")
    rows = {row["name"]: row for row in card["accesses"]["covered"]}
    noise = rows["evaluation"]["event"]["noise_multiplier"]
    assert card["evaluation"]["noise_multiplier"] == noise
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    whole = events.Composed(
        (*(p.event for p in ledger.permits() if p.name == "training"), events.Gaussian(noise))
    )
    due = accounting.epsilon(whole, 1e-3, adjacency=ledger.adjacency)
    assert card["guarantee"]["epsilon"] == pytest.approx(due, rel=1e-6)
    assert set(card["utility"]) == {"test_accuracy", "test_accuracy_noise"}
    assert "charged in the ledger" in (tmp_path / "run" / "report.html").read_text()
    assert all(f.holds for f in dpfy.verify(tmp_path / "run")), dpfy.verify(tmp_path / "run")
    assert all(f.holds for f in dpfy.verify(tmp_path / "run" / "privacy.json"))


def test_the_evaluation_is_reserved_before_the_data_is_read(table, tmp_path, monkeypatch):
    seen = []

    def load(settings, **how):
        seen.extend(p.name for p in Ledger.read(tmp_path / "run" / "ledger.jsonl").permits())
        seen.extend(p.name.split()[0] for p in Ledger.read(tmp_path / "all.jsonl").permits())
        raise InvalidInput("data", 1, "stop here")

    monkeypatch.setattr(job.source, "load", load)
    with pytest.raises(InvalidInput, match="stop here"):
        run(tmp_path / "run", table, data__test="billed", ledger__path=str(tmp_path / "all.jsonl"))
    assert seen == ["training", "evaluation"] * 2
    assert Ledger.read(tmp_path / "all.jsonl").permits() == []
    assert not (tmp_path / "run").exists()


def test_a_budget_that_has_room_for_the_training_alone_is_not_spent(table, tmp_path):
    ledger = {
        "ledger__path": str(tmp_path / "all.jsonl"),
        "ledger__budget_epsilon": 2.0,
        "ledger__budget_delta": 1e-3,
    }
    with pytest.raises(BudgetExceeded):
        run(
            tmp_path / "run",
            table,
            data__test="billed",
            privacy__noise_multiplier=1.5,
            privacy__test_noise=0.8,
            **ledger,
        )
    assert Ledger.read(tmp_path / "all.jsonl").permits() == []
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", table, data__test="withheld", privacy__noise_multiplier=1.5, **ledger)


def test_the_words_of_the_command_line(table, tmp_path, capsys):
    lines = [
        f'[data]\nkind = "npz"\npath = "{table["data.path"]}"\nclasses = 3\nrange = [-4.0, 4.0]',
        '[model]\nname = "linear"',
    ]
    lines += ["[privacy]\nrecords = 160\ndelta = 1e-3", "[training]\nsteps = 2"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    for use, said in (
        (["--set", "data.test=withheld"], "withheld"),
        ([], "withheld"),
        (["--set", "data.test=public"], "declared public"),
        (["--set", "data.test=billed", "--set", "privacy.test_noise=3"], "charged in the ledger"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    "train",
                    str(tmp_path / "job.toml"),
                    *use,
                    "--out",
                    str(tmp_path / "".join(["run", *use]).replace("-", "")),
                ]
            )
        first = capsys.readouterr().out.splitlines()[0]
        assert stop.value.code == 0
        assert said in first
        assert ("accuracy" in first) == (said != "withheld")


def stub(model: torch.nn.Module, folder: Path, seed: int, noise: float = 5.0) -> SimpleNamespace:
    """As much of a training as an evaluation looks at."""
    permit = mock_permit(events.Gaussian(noise), 1)
    place = SimpleNamespace(
        promised=SimpleNamespace(evaluation=noise),
        randomness=Randomness.for_tests(seed),
        secrets=folder,
        bind=lambda name, content: None,
        begin_evaluation=lambda: permit,
    )
    plan = SimpleNamespace(recipe=SimpleNamespace(unit=EXAMPLE))
    return SimpleNamespace(
        model=model, averaged=contextlib.nullcontext, device="cpu", folder=place, plan=plan
    )


def held_out(count: int = 30) -> Records:
    x, y = small.data()
    return Records((x[:count], y[:count]))


def test_the_noise_of_the_counts_has_the_scale_of_the_bill(tmp_path):
    """Accepts the stated scale and rejects two thirds and three halves of it (900 cells: the
    estimate is off by 2.4%).
    """
    model, noise = torch.nn.Linear(small.FEATURES, 3), 400.0
    test, cells = held_out(6), []
    for seed in range(100):
        (tmp_path / str(seed)).mkdir()
        training = stub(model, tmp_path / str(seed), seed, noise)
        exact = torch.tensor(evaluation.confusion(training, test)) + 100_000
        with pytest.MonkeyPatch.context() as patch:  # counts so high that none is cut off at zero
            real = evaluation._cells
            patch.setattr(
                evaluation, "_cells", lambda *a, real=real: real(*a) + 100_000 / len(test)
            )
            found = evaluation.billed(training, test)
        cells.append((torch.tensor(found.confusion) - exact).flatten())
    spread = float(torch.cat(cells).double().std()) / (noise * math.sqrt(2))
    assert 0.9 < spread < 1.1


class Mixing(torch.nn.Linear):
    """Mixes examples, but only when it is evaluated."""

    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x - x.mean(0))


@pytest.mark.parametrize("kind", [torch.nn.Linear, Mixing])
def test_one_record_moves_the_counts_by_at_most_its_bound(tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    model, whole, sums = kind(small.FEATURES, 3), held_out(), []
    real = NoiseStream.release

    def release(self, total, *others):
        sums.append(total)
        return real(self, total, *others)

    monkeypatch.setattr(NoiseStream, "release", release)
    for left_out in [None, *range(len(whole))]:
        kept = torch.tensor([i for i in range(len(whole)) if i != left_out])
        (tmp_path / str(left_out)).mkdir()
        evaluation.billed(stub(model, tmp_path / str(left_out), 1), Records(whole.take(kept)))
    for other in sums[1:]:
        assert other.bound.l2 == evaluation.ONE_RECORD
        assert (
            float((sums[0].value["counts"] - other.value["counts"]).norm()) <= evaluation.ONE_RECORD
        )
    assert float(sums[0].value["counts"][:2].sum()) == len(whole)


def test_a_record_of_many_labels_adds_its_share_to_right_and_the_rest_to_wrong(tmp_path):
    x, _ = small.data()
    net = torch.nn.Linear(small.FEATURES, 4)
    labels = (x[:, :4] > 1).float()
    aim = evaluation.Objective("multi_label")
    exact = ((net(x) > 0) == (labels > 0.5)).double().mean(1).sum()
    table, sums = evaluation._answered(stub(net, tmp_path, 1), Records((x, labels)), aim)
    assert table is None
    assert torch.allclose(sums, torch.stack([exact, len(x) - exact]))
    assert abs(float(exact) / len(x) - 0.5) > 0.01
    found = evaluation.billed(stub(net, tmp_path, 1, noise=0.1), Records((x, labels)), aim)
    assert found.utility["test_accuracy"] == pytest.approx(float(exact) / len(x), abs=0.01)
    assert found.confusion is None


def test_many_classes_are_counted_as_right_and_wrong_alone(tmp_path):
    test = Records((torch.randn(20, 4), torch.randint(0, 60, (20,))))
    found = evaluation.billed(stub(torch.nn.Linear(4, 60), tmp_path, 1), test)
    assert found.confusion is None
    assert 0 <= found.utility["test_accuracy"] <= 1


def test_what_has_no_classes_cannot_be_billed(tmp_path):
    test = Records((torch.randn(20, 4), torch.randn(20)))
    with pytest.raises(Unsupported, match="anything but classes"):
        evaluation.billed(stub(torch.nn.Linear(4, 1), tmp_path, 1), test)


def test_what_cannot_be_billed_is_refused_before_the_first_step(tmp_path):
    x, y = small.data()
    net = torch.nn.Sequential(torch.nn.Linear(small.FEATURES, 1), torch.nn.Flatten(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {
        "plan": small.plan(3),
        "optimizer": optimizer,
        "loss": "squared_error",
        "evaluation": dpfy.PrivateTest((x, y.float())),
    }
    with pytest.raises(Unsupported, match="anything but classes"):
        dpfy.fit(
            net,
            (x, y.float()),
            run=dpfy.Run(tmp_path / "run", ledger=tmp_path / "all.jsonl"),
            **options,
        )
    assert not (tmp_path / "run").exists()
    assert Ledger.read(tmp_path / "all.jsonl").permits() == []
    with (
        TrainingRun(dpfy.Run(tmp_path / "run"), small.plan(3)) as folder,
        pytest.raises(InvalidInput, match=r"evaluation="),
    ):
        dpfy.fit(net, (x, y), run=folder, **options)


def numbers() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, _ = small.data()
    return (
        torch.nn.Sequential(torch.nn.Linear(small.FEATURES, 1), torch.nn.Flatten(0)),
        x,
        x[:, 0] * 3,
    )


def test_losses_up_to_a_bound_are_billed(tmp_path, monkeypatch):
    """Each record adds its loss in parts of the bound, one that is huge or no number all of it;
    noise is that of the bill.
    """
    net, x, y = numbers()
    y[0], y[1] = 1e9, math.nan
    aim, exact = (
        evaluation.Objective("mse"),
        (net(x) - y).square().nan_to_num(9.0).clamp(max=2.0).double(),
    )
    sums = evaluation._bounded_losses(stub(net, tmp_path, 1), Records((x, y)), aim, 2.0)
    assert torch.allclose(sums, torch.stack([len(x) - exact.sum() / 2, exact.sum() / 2]))
    seen = []
    real = NoiseStream.release
    monkeypatch.setattr(
        NoiseStream,
        "release",
        lambda s, total, *more: [seen.append(total), real(s, total, *more)][1],
    )
    found = evaluation.billed(stub(net, tmp_path, 1, noise=0.1), Records((x, y)), aim, 2.0)
    assert found.utility["test_loss"] == pytest.approx(float(exact.mean()), abs=0.02)
    assert found.utility["test_loss_bound"] == 2.0
    assert 0 < found.utility["test_loss_noise"] < 0.02
    assert seen[0].bound.l2 == evaluation.ONE_RECORD
    assert torch.equal(seen[0].value["counts"], sums)


def test_a_billed_regression_is_part_of_the_guarantee_and_keeps_its_bound(tmp_path, monkeypatch):
    net, x, y = numbers()

    def fit(bound: float | None, **more: object) -> Result:
        adam = torch.optim.Adam(net.parameters(), lr=0.05)
        run = dpfy.Run(tmp_path / "run", resume=True, seed=5)
        options = {
            "loss": "mse",
            "evaluation": dpfy.PrivateTest((x, y), bound=bound),
        } | more
        return dpfy.fit(net, (x, y), plan=small.plan(3), optimizer=adam, run=run, **options)

    with pytest.raises(Unsupported, match="bound="):
        fit(None)
    for wrong in (-1.0, math.inf):
        with pytest.raises(InvalidInput, match=r"PrivateTest\.bound"):
            fit(wrong)
    with monkeypatch.context() as crash:
        crash.setattr("dpfy.training.finish.write", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(4.0)
    net, *_ = numbers()
    with pytest.raises(InvalidInput, match="resume test: got"):
        fit(2.0)
    net, *_ = numbers()
    found = fit(4.0)
    assert found.epsilon > small.plan(3).epsilon
    assert 0 <= found.utility["test_loss"] <= 4.0
    card = small.card_of(tmp_path / "run")
    assert card["evaluation"]["test"] == "billed"
    assert card["utility"]["test_loss_bound"] == 4.0
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def billed_run(path: Path, evaluation: object) -> Result:
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = dpfy.Run(path, resume=True, seed=5)
    return dpfy.fit(
        net,
        small.data(),
        plan=small.plan(3),
        optimizer=optimizer,
        run=run,
        evaluation=evaluation,  # type: ignore[arg-type]
    )


def noisy(x: torch.Tensor, y: torch.Tensor, noise: float = 2.0) -> dpfy.PrivateTest:
    return dpfy.PrivateTest((x, y), noise_multiplier=noise)


def test_a_resumed_evaluation_is_the_same_and_other_test_data_is_refused(tmp_path, monkeypatch):
    """The difference of two evaluations with the same noise would have none."""

    class Killed(BaseException):
        pass

    def killed(*arguments: object) -> None:
        raise Killed

    x, y = small.data()
    billed_run(tmp_path / "whole", noisy(x, y))
    with monkeypatch.context() as patch:
        patch.setattr(cards, "build", killed)
        with pytest.raises(Killed):
            billed_run(tmp_path / "cut", noisy(x, y))
    with pytest.raises(InvalidInput, match="resume test"):
        billed_run(tmp_path / "cut", noisy(x[1:], y[1:]))
    with pytest.raises(InvalidInput, match="resume evaluation"):
        billed_run(tmp_path / "cut", noisy(x, y, 3.0))
    with pytest.raises(InvalidInput, match="resume evaluation"):
        billed_run(tmp_path / "cut", dpfy.WithheldTest((x, y)))
    billed_run(tmp_path / "cut", noisy(x, y))
    whole, cut = (small.card_of(tmp_path / name) for name in ("whole", "cut"))
    assert (whole["confusion"], whole["utility"]) == (cut["confusion"], cut["utility"])
    assert whole["confusion"] != evaluation.confusion(
        stub(small.model(), tmp_path, 1), held_out(200)
    )


def test_withheld_test_data_is_for_the_caller_alone(tmp_path):
    result = billed_run(tmp_path / "run", dpfy.WithheldTest(small.data()))
    assert set(result.utility) == {"test_loss", "test_accuracy"}
    card = small.card_of(tmp_path / "run")
    assert card["evaluation"]["test"] == "withheld"
    for name in ("privacy.json", "metrics.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        assert repr(result.utility["test_loss"]) not in text
        assert "test_loss" not in text


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (lambda data: dpfy.PublicTest(None), "needs data to evaluate on"),
        (lambda data: dpfy.PrivateTest(None), "needs data to evaluate on"),
        (lambda data: data, r"tuple.*say what the test data is: dpfy\.PublicTest\(data\)"),
        (lambda data: "public", "say what the test data is"),
        (lambda data: dpfy.PrivateTest(data, noise_multiplier=0.0), r"PrivateTest\.noise_multi"),
        (lambda data: dpfy.PrivateTest(data, noise_multiplier=math.inf), r"PrivateTest\.noise_m"),
        (lambda data: dpfy.PrivateTest(data, bound=0.0), r"PrivateTest\.bound"),
    ],
)
def test_bad_declarations(tmp_path, declared, said):
    with pytest.raises(InvalidInput, match=said):
        billed_run(tmp_path / "run", declared(small.data()))
    assert not (tmp_path / "run").exists()


def test_public_figures_take_no_noise():
    with pytest.raises(TypeError, match="noise_multiplier"):
        dpfy.PublicTest(small.data(), noise_multiplier=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bound"):
        dpfy.WithheldTest(small.data(), bound=1.0)  # type: ignore[call-arg]


def test_nothing_shows_the_test_data():
    x, y = small.data()
    for kind in (dpfy.PublicTest, dpfy.PrivateTest, dpfy.WithheldTest):
        assert "tensor" not in repr(kind((x, y)))


def test_the_noise_of_a_plan_without_a_guarantee_must_be_given(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="must be given where training itself"):
        dpfy.fit(
            net,
            small.data(),
            plan=small.plan(3, 0.0),
            optimizer=optimizer,
            evaluation=dpfy.PrivateTest(small.data()),
        )


def test_a_card_cannot_state_figures_that_nobody_declared_or_paid(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    told, none = (
        {"utility": {"test_accuracy": 1.0}, "confusion": {"absent": "x"}},
        {"utility": {"absent": "x"}, "confusion": {"absent": "x"}},
    )
    for test in ("withheld", "none"):
        uses.row(test, none, ledger)
        with pytest.raises(Corrupt, match="states utility"):
            uses.row(test, told, ledger)
    with pytest.raises(Corrupt, match="ledger does not hold"):
        uses.row("billed", told, ledger)
    ledger.reserve("evaluation", events.Gaussian(4.0))
    assert uses.row("billed", told, ledger)["noise_multiplier"] == 4.0


def test_a_number_of_records_that_forgets_the_held_out_ones_is_explained(table, tmp_path):
    wrong = table | {"privacy.records": 200, "privacy.adjacency": "replace-one"}
    with pytest.raises(
        InvalidInput,
        match=r"there are 160 records to train on \(200 less the 40 held out .*give --records 160",
    ):
        run(tmp_path / "run", wrong)
    assert not (tmp_path / "run").exists()


def test_public_sizes_follow_the_held_out_share():
    for share, records in ((0.2, 1438), (0.5, 899), (1e-9, 1796)):
        assert job.public_records(config.DataConfig(kind="digits", test_fraction=share)) == records
    assert job.public_records(config.DataConfig(kind="adult")) == 24_130
    assert job.public_records(config.DataConfig(kind="shakespeare")) == 6_917
    assert job.public_records(config.DataConfig(kind="shakespeare", length=64)) is None


@pytest.mark.parametrize("use", ["billed", "withheld", "public"])
def test_test_data_is_read_once_everything_is_reserved(tmp_path, monkeypatch, use):
    x, y = small.data()
    plan = dpfy.dpsgd(records=len(x), batch_size=40, steps=2).calibrate(epsilon=3.0, delta=1e-3)
    model, ledger, seen = torch.nn.Linear(x.shape[1], 3), tmp_path / "run" / "ledger.jsonl", []
    real = fit.as_source

    def watched(test):
        seen.append(Ledger.read(ledger).permits() if ledger.is_file() else [])
        return real(test)

    monkeypatch.setattr(fit, "as_source", watched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dpfy.fit(
        model,
        (x, y),
        plan=plan,
        optimizer=optimizer,
        run=tmp_path / "run",
        evaluation=(dpfy.PrivateTest if use == "billed" else dpfy.PublicTest)((x + 1, y)),
    )
    assert [{p.name for p in permits} for permits in seen] == [
        {"training", "evaluation"} if use == "billed" else {"training"}
    ]
