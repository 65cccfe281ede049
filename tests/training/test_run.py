"""Run folders: resuming, refusing, and being safe to publish."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import Busy, Corrupt, InvalidInput
from dpfy.plan import ForeignBatches
from dpfy.training import TrainingRun, Update

sys.path.insert(0, str(Path(__file__).parent))
import small


def stop_after(path: Path, steps: int, seed: int = 5, ledger: Path | None = None) -> None:
    """Begin a run and leave it after some steps, as a user who breaks out of the loop does."""
    torch.set_num_threads(1)
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    update = Update(average=0.9, schedule=lambda step: 1 / (1 + 0.05 * step))
    run = dpfy.Run(path, seed=seed, ledger=ledger)
    runtime = dpfy.Runtime(max_physical_batch=12)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(), run, runtime=runtime, update=update
    ) as training:
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == steps:
                break


def test_resumed_equals_uninterrupted(tmp_path):
    small.train(dpfy.Run(tmp_path / "whole", seed=5))
    stop_after(tmp_path / "cut", 17)
    assert not (tmp_path / "cut" / "privacy.json").exists()
    small.train(dpfy.Run(tmp_path / "cut", resume=True))
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_an_unfinished_run_is_not_overwritten(tmp_path):
    stop_after(tmp_path / "run", 3)
    with pytest.raises(InvalidInput, match="unfinished run; resume it"):
        small.train(tmp_path / "run")


def test_a_finished_run_is_not_overwritten(tmp_path):
    small.train(tmp_path / "run", steps=2)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(InvalidInput, match="already holds a finished run"):
        small.train(tmp_path / "run", steps=2)
    with pytest.raises(InvalidInput, match="already holds a finished run"):
        small.train(dpfy.Run(tmp_path / "run", resume=True), steps=3)
    again = dpfy.Run(tmp_path / "run", resume=True)
    net = small.model()
    training = dpfy.PrivateTraining(
        net, torch.optim.Adam(net.parameters(), lr=0.05), small.data(), small.plan(2), again
    )
    with pytest.raises(InvalidInput, match="already holds a finished run"), training:
        pass
    assert small.train(again, steps=2).engine == "finished before"
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}


def test_a_different_plan_is_refused(tmp_path):
    stop_after(tmp_path / "run", 3)
    with pytest.raises(
        InvalidInput, match=r"different plan \(noise_multiplier: 2.0 there, 3.0 here\)"
    ):
        small.train(dpfy.Run(tmp_path / "run", resume=True), noise=3.0)


def test_other_data_or_settings_are_refused_on_resume(tmp_path):
    """The same noise must never meet other gradients."""
    stop_after(tmp_path / "run", 3)
    x, y = small.data()
    x[0, 0] += 1
    net = small.model()
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    run, plan, runtime = (
        dpfy.Run(tmp_path / "run", resume=True),
        small.plan(),
        dpfy.Runtime(max_physical_batch=12),
    )
    with pytest.raises(InvalidInput, match="resume data"):
        dpfy.fit(
            net,
            (x, y),
            plan=plan,
            optimizer=adam,
            run=run,
            runtime=runtime,
            update=Update(0.9),
        )
    faster = torch.optim.Adam(net.parameters(), lr=0.5)
    with pytest.raises(InvalidInput, match="resume optimizer"):
        dpfy.fit(
            net,
            small.data(),
            plan=plan,
            optimizer=faster,
            run=run,
            runtime=runtime,
            update=Update(0.9),
        )
    with pytest.raises(InvalidInput, match="resume average"):
        dpfy.fit(net, small.data(), plan=plan, optimizer=adam, run=run, runtime=runtime)
    small.train(run)  # the right one still resumes


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path, damage):
    stop_after(tmp_path / "run", 3)
    state = tmp_path / "run" / "checkpoint" / "state.safetensors"
    whole = state.read_bytes()
    if damage == "flip":
        state.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    elif damage == "cut":
        state.write_bytes(whole[: len(whole) // 2])
    else:
        stop_after(tmp_path / "other", 3, seed=6)
        state.write_bytes((tmp_path / "other" / "checkpoint" / "state.safetensors").read_bytes())
    with pytest.raises(Corrupt, match=r"checkpoint/state\.safetensors"):
        small.train(dpfy.Run(tmp_path / "run", resume=True))


def test_a_run_whose_secret_is_gone_cannot_be_resumed(tmp_path):
    stop_after(tmp_path / "run", 3)
    (tmp_path / "run" / "checkpoint" / "secret.json").unlink()
    with pytest.raises(Corrupt, match="start a new one"):
        small.train(dpfy.Run(tmp_path / "run", resume=True))


@pytest.mark.parametrize("fixed", ["null", "1", '"yes"'])
def test_a_secret_that_does_not_say_whether_it_was_fixed_is_damaged(tmp_path, fixed):
    stop_after(tmp_path / "run", 3)
    file = tmp_path / "run" / "checkpoint" / "secret.json"
    file.write_text(re.sub(r'"fixed": \w+', f'"fixed": {fixed}', file.read_text()))
    with pytest.raises(Corrupt, match=r"checkpoint/secret\.json"):
        small.train(dpfy.Run(tmp_path / "run", resume=True))


@pytest.mark.parametrize("device", ["meta", "cuda:99999999999999999999", "nothing"])
def test_a_device_that_does_not_compute_is_refused(device):
    with pytest.raises(InvalidInput, match="must be a device of this machine"):
        dpfy.Runtime(device=device)


def test_a_foreign_folder_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInput, match="holds no dpfy run"):
        small.train(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["thesis.tex"]


def test_one_process_at_a_time(tmp_path):
    stop_after(tmp_path / "run", 3)
    from dpfy.core.ledger import hold
    from dpfy.runs.mark import Mark

    with (
        hold(Mark.find(tmp_path / "run").file, "test"),
        pytest.raises(Busy, match="another process"),
    ):
        small.train(dpfy.Run(tmp_path / "run", resume=True))


def test_secrets_are_in_files_only_their_owner_can_read(tmp_path):
    old = os.umask(0)
    try:
        stop_after(tmp_path / "run", 3)
    finally:
        os.umask(old)
    hidden = tmp_path / "run" / "checkpoint"
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
    secret = json.loads((hidden / "secret.json").read_text())["secret"]
    for file in hidden.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    for file in (tmp_path / "run").iterdir():
        if file.is_file():
            assert secret.encode() not in file.read_bytes()
            assert bytes.fromhex(secret) not in file.read_bytes()


def test_a_finished_run_folder_is_safe_to_publish(tmp_path, monkeypatch):
    """No seed, no noise state, no record, no per-example value, no absolute path in any file."""
    from dpfy.core.randomness import Randomness
    from dpfy.noise.gaussian import draw
    from dpfy.training import config, job

    x, y = small.data()
    np.savez(tmp_path / "secret_people.npz", x=x.numpy(), y=y.numpy())
    flags = {
        "data.kind": "npz", "data.path": str(tmp_path / "secret_people.npz"), "data.classes": 3, "data.range": (-4.0, 4.0),  # noqa: E501
        "data.test_fraction": 0.2, "privacy.records": 160, "privacy.delta": 1e-3, "model.name": "linear", "training.batch_size": 40.0,  # noqa: E501
        "training.steps": 4, "ledger.path": str(tmp_path / "people.jsonl"),
    }  # fmt: skip
    randomness = Randomness.for_tests(9)
    job.run(config.make({}, flags), tmp_path / "run", seed=9)
    files = sorted(p for p in (tmp_path / "run").rglob("*") if p.is_file())
    names = {
        "config.toml",
        "ledger.jsonl",
        "metrics.jsonl",
        "model.safetensors",
        "plan.json",
        "privacy.json",
        "ledger.jsonl.head",
    }
    assert names <= {p.name for p in files} <= names | {"report.html", "report.md"}
    noise = draw({"w": torch.zeros(3, small.FEATURES)}, randomness, "noise", 0)["w"]
    needles = [
        randomness.secret,
        randomness.secret.hex().encode(),
        str(tmp_path).encode(),
        str(Path.home()).encode() + b"/",
        os.getcwd().encode(),
    ]
    needles += [row.numpy().tobytes() for row in x] + [noise.numpy().tobytes()[:16]]
    needles += [repr(float(v)).encode() for v in x[:5].flatten()]
    for file in files:
        content = file.read_bytes()
        for needle in needles:
            assert needle not in content, (file.name, needle)
        if file.suffix != ".safetensors":
            assert not re.search(rb"[\"' ]/(home|root|tmp|work|Users|var)/", content), file.name
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {key for row in rows for key in row} == {
        "step",
        "epsilon",
    }  # held-out records are private too


def test_refused_input_gives_the_reservation_back(tmp_path):
    """A bad data file costs no budget and leaves no folder."""
    from dpfy.core.ledger import Ledger
    from dpfy.training import config, job

    (tmp_path / "bad.npz").write_bytes(b"not an archive")
    flags = {
        "data.kind": "npz", "data.path": str(tmp_path / "bad.npz"), "data.classes": 3, "privacy.records": 160, "privacy.delta": 1e-3,  # noqa: E501
        "model.name": "linear", "ledger.path": str(tmp_path / "people.jsonl"), "ledger.budget_epsilon": 4.0,
    }  # fmt: skip
    for _ in range(3):
        with pytest.raises((InvalidInput, Corrupt), match=r"bad\.npz"):
            job.run(config.make({}, flags), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert Ledger.read(tmp_path / "people.jsonl").permits() == []


def test_ending_early_keeps_the_whole_bill(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(), tmp_path / "run"
    ) as training:
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == 5:
                training.finish()
                break
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["sections"][0]["steps_done"] == 5
    assert card["guarantee"]["epsilon"] == small.plan().epsilon
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_a_test_seed_is_a_caveat(tmp_path):
    small.train(dpfy.Run(tmp_path / "run", seed=1), steps=2)
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "whoever knows it can remove the noise" in card["statement"]


def test_a_run_whose_checkpoint_is_gone_cannot_start_again_nor_get_its_budget_back(tmp_path):
    """The same noise would meet other gradients, and what was released stays billed."""
    stop_after(tmp_path / "run", 3)
    (tmp_path / "run" / "checkpoint" / "state.safetensors").unlink()
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(Corrupt, match="start a new run"):
        small.train(dpfy.Run(tmp_path / "run", resume=True))
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_a_unit_of_several_records_needs_data_that_is_grouped_by_it(tmp_path):
    x, y = small.data()
    users = torch.arange(len(x)) // 5
    grouped, net = dpfy.by_user((x, y), users, most=5), small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = dpfy.dpsgd(len(grouped), 10, steps=2, unit=grouped.unit).with_noise(1.0)
    other = dpfy.dpsgd(len(grouped), 10, steps=2).with_noise(1.0)
    for train, wrong in (
        ((x, y), plan),
        (grouped, other),
        (dpfy.by_user((x, y), users, most=4), plan),
    ):
        with (
            pytest.raises(InvalidInput, match=r"dpfy\.by_user"),
            dpfy.PrivateTraining(net, optimizer, train, wrong, tmp_path / "a"),
        ):
            pass
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("most", [2, 5])
def test_a_plan_for_users_never_accepts_ungrouped_data(tmp_path, most):
    """The numbers agree: as many records as the plan has users. Each record would count as a user
    of its own.
    """
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = dpfy.dpsgd(small.RECORDS, 20, steps=2, unit=dpfy.Unit("user", most)).with_noise(1.0)
    with pytest.raises(
        InvalidInput, match=rf"owns up to {most}; group the data with dpfy\.by_user"
    ):
        dpfy.fit(net, small.data(), plan=plan, optimizer=optimizer, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_crash_after_the_end_publishes_the_card_that_the_ledger_names(tmp_path, monkeypatch):
    """Whatever the resumed run would say now: other figures, other rows of metrics."""
    from dpfy.report.verify import verify
    from dpfy.runs import folder

    def crash(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "publish", crash)
    with pytest.raises(KeyboardInterrupt):
        small.train(dpfy.Run(tmp_path / "run", seed=5))
    monkeypatch.undo()
    assert not (tmp_path / "run" / "privacy.json").exists()
    staged = (tmp_path / "run" / "checkpoint" / "privacy.json").read_bytes()
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    assert any("unfinished" in f.detail for f in verify(tmp_path / "run"))
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert small.train(dpfy.Run(tmp_path / "run", seed=5, resume=True)).engine == "finished before"
    assert (tmp_path / "run" / "privacy.json").read_bytes() == staged
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == ledger
    assert all(f.holds for f in verify(tmp_path / "run"))
    (again / "checkpoint" / "privacy.json").write_bytes(
        staged.replace(b'"test_accuracy"', b'"best_accuracy"')
    )
    with pytest.raises(Corrupt, match=r"checkpoint/privacy\.json"):
        small.train(dpfy.Run(again, seed=5, resume=True))


def test_a_run_that_ended_releases_nothing_more(tmp_path, monkeypatch):
    """Ended early, killed before the card: the permit allows no further step."""
    net = small.model()
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), small.plan(), tmp_path / "run"
    ) as training:
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
            training.finish()
            break
        permit = training.folder.ledger.begin(training.folder.permit)
        with pytest.raises(InvalidInput, match="nothing more may be released"):
            permit.check(1, permit.event)


def test_no_step_before_the_beginning_is_written_in_both_ledgers(tmp_path):
    from dpfy.core.ledger import Ledger

    people = tmp_path / "people.jsonl"
    net = small.model()
    run = dpfy.Run(tmp_path / "run", ledger=people)
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), small.plan(), run
    ) as training:
        with pytest.raises(InvalidInput, match="before the first release"):
            training.folder.permit.check(0, training.folder.permit.event)
        for x, y in training.batches():
            training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done:
                break
        for file in (people, tmp_path / "run" / "ledger.jsonl"):
            ledger = Ledger.read(file)
            assert ledger.book.begun == {ledger.permits()[0].entry}
            with pytest.raises(InvalidInput, match="has started"):
                ledger.void(ledger.permits()[0], "it never happened")


def test_a_ledger_whose_budget_makes_no_sense_is_one_line(tmp_path):
    from dpfy.core.ledger import HashChain

    terms = {"unit": {"name": "example", "most_records": 1}, "adjacency": "add-or-remove-one"}
    for budget in (
        {},
        {"kind": "renyi"},
        {"kind": 3},
        {"kind": "renyi-filter", "epsilon": "x", "delta": []},
        {"epsilon": 1.0, "x": 2},
    ):
        header = {"type": "ledger", "version": 2, "ledger": "0" * 16, "budget": budget, **terms}
        chain = HashChain()
        (tmp_path / "people.jsonl").write_bytes(line := chain.add(header))
        mark = {"entries": 1, "head": chain.head, "length": len(line)}
        (tmp_path / "people.jsonl.head").write_text(json.dumps(mark))
        with pytest.raises(Corrupt, match=r"people\.jsonl: holds a budget that cannot be read"):
            small.train(dpfy.Run(tmp_path / "run", ledger=tmp_path / "people.jsonl"))
        assert not (tmp_path / "run").exists()


def test_a_resumed_run_must_ask_for_what_was_reserved(tmp_path):
    """Without the data set's ledger, or with batches formed elsewhere after all, it would be
    another claim.
    """
    people = tmp_path / "people.jsonl"
    stop_after(tmp_path / "run", 3, ledger=people)
    with pytest.raises(
        InvalidInput, match="reserves something else than this run asks for: shared"
    ):
        small.train(dpfy.Run(tmp_path / "run", resume=True, seed=5))
    batches = ForeignBatches("read in order")
    run = dpfy.Run(tmp_path / "run", resume=True, seed=5, ledger=people)
    with pytest.raises(
        InvalidInput, match=r"reserves something else than this run asks for: claim\.batches"
    ):
        small.train(TrainingRun(run, small.plan(), batches=batches))
    small.train(dpfy.Run(tmp_path / "run", resume=True, seed=5, ledger=people))
