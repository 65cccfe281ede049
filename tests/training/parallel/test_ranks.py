"""Several ranks make the run that one process would: the same batches, sums, noise and weights, and
the same bill.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.training.parallel import ranked

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.training import World
from dpfy.training.parallel import fully_sharded

KINDS = ["dpsgd", "lazy", "few", "banded", "blt", "adaptive", "exact"]
CASES = [
    *((kind, "plain") for kind in KINDS),
    ("dpsgd", "ddp"),
    *((kind, "fsdp") for kind in KINDS if kind != "lazy"),
]
CASES += [("dpsgd", "offload"), ("dpsgd", "mixed")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process, by plan."""
    folder = tmp_path_factory.mktemp("alone")
    return {kind: ranked.train(kind, dpfy.Run(folder / kind, seed=3)) for kind in KINDS}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request, tmp_path_factory):
    """The number of ranks, and the folder of their runs."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    ranked.done(ranked.start(ranked.cases, request.param, str(folder), CASES))
    return request.param, folder


@pytest.mark.parametrize(("kind", "wrap"), CASES)
def test_ranks_make_the_run_of_one_process(alone, together, kind, wrap):
    ranks, folder = together
    found, close = (
        ranked.results(folder, f"{kind}-{wrap}", ranks),
        1e-4 if wrap == "mixed" else 1e-9,
    )
    for mine in found:
        for name, value in alone[kind].items():
            if name == "past":
                continue
            if isinstance(value, float):
                assert abs(mine[name] - value) < close
            elif kind != "exact":  # whose shards draw from streams of their own
                assert (mine[name] - value).abs().max() < close
            assert not isinstance(value, torch.Tensor) or torch.equal(mine[name], found[0][name])
    assert sum(mine["past"] for mine in found) == alone[kind]["past"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two ranks did, one thing after the other, in one folder."""
    folder = tmp_path_factory.mktemp("pair")
    ranked.done(ranked.start(ranked.several, 2, str(folder)))
    return folder


SAID = {
    "plan": "another plan",
    "data": "another number of records",
    "record": "another data",
    "model": "another model",
    "code": "another model",
    "rate": "changed outside of the schedule",
    "weights": "another weights",
    "failure": "the disk is full",
}


@pytest.mark.parametrize("how", SAID)
def test_a_rank_that_disagrees_or_fails_ends_the_run_on_all_ranks_before_noise(pair, how):
    for rank in range(2):
        kind, words, released, left = torch.load(pair / f"told-{rank}.pt", weights_only=False)[how]
        assert (
            SAID[how] in words
            or SAID[how] in torch.load(pair / "told-1.pt", weights_only=False)[how][1]
        )
        assert kind == "Lost" or rank == 1
        assert (released <= 2) is True
        assert left is (
            released >= 0
        )  # a run that released nothing is undone, its reservation given back


def test_a_rank_that_does_not_answer_is_an_error_in_time(pair):
    assert "does not answer" in (pair / "silent").read_text()


def test_a_folder_in_use_ends_the_training_on_all_ranks_at_once(pair):
    for rank in range(2):
        assert (
            (pair / f"busy-{rank}").read_text().startswith("None ")
        )  # the group for words is let go of
        assert "another training is using it" in (pair / f"busy-{rank}").read_text()


def test_a_run_is_resumed_by_as_many_ranks_as_began_it(pair):
    ranked.done(ranked.start(ranked.other_number, 3, str(pair)))
    assert all(
        "2 (torchrun --nproc-per-node=2)" in (pair / f"number-{rank}").read_text()
        for rank in range(3)
    )
    with pytest.raises(
        InvalidInput, match="resume ranks: got 1; must be what the run was started with: 2"
    ):
        ranked.train("banded", dpfy.Run(pair / "run", resume=True, seed=3))


def test_processes_that_torchrun_starts_again_resume_the_run(alone, tmp_path):
    assert ranked.outcomes(ranked.start(ranked.restarted, 2, str(tmp_path))) == [-9, -9]
    assert ranked.outcomes(ranked.start(ranked.restarted, 2, str(tmp_path))) == [0, 0]
    for found in ranked.results(tmp_path, "elastic", 2):
        assert all(
            (found[n] - v).abs().max() < 1e-9
            for n, v in alone["banded"].items()
            if isinstance(v, torch.Tensor)
        )


def test_one_coin_a_record_whatever_the_number_of_ranks(pair):
    """Each record is drawn at the rate, once, on one rank, and independently of the others. 5
    standard errors.
    """
    counts = sum(np.load(pair / f"drawn-{rank}.npy") for rank in range(2))
    assert counts.max() == 1
    steps, rate = len(counts), 9 / ranked.RECORDS
    error = np.sqrt(rate * (1 - rate) / steps)
    assert np.abs(counts.mean(0) - rate).max() < 5 * error
    sizes = counts.sum(1)
    spread = ranked.RECORDS * rate * (1 - rate)
    assert abs(sizes.var() / spread - 1) < 5 * np.sqrt(2 / steps)
    both = np.load(pair / "drawn-0.npy")[:, :, None] * np.load(pair / "drawn-1.npy")[:, None, :]
    together = (both + both.transpose(0, 2, 1)).sum(0)[np.triu_indices(ranked.RECORDS, 1)]
    assert together.mean() > 0  # ranks share the batch; neither draws one of its own


def test_shares_hold_the_batch_once_and_differ_by_one_record_at_most():
    for count in (1, 2, 3, 7):
        for size in (0, 1, 5, 64):
            indices = np.arange(size)
            shares = [World(rank, count).share(indices) for rank in range(count)]
            assert np.concatenate(shares).tolist() == indices.tolist()
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert max(map(len, shares)) == len(World(0, count).largest_share(indices))


def test_groups_of_gathered_parameters_are_found_in_every_torch():
    """Several a module since 2.13, before it one or none."""
    assert fully_sharded._groups(SimpleNamespace(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
    assert fully_sharded._groups(SimpleNamespace(_fsdp_param_group="a")) == ["a"]
    assert fully_sharded._groups(SimpleNamespace(_fsdp_param_group=None)) == []
