"""Several ranks make the run that one process would: the same batches, sums, noise and weights, and the same bill."""

from __future__ import annotations

import pytest
import torch
from tests.training import ranked

import dpfy

KINDS = ["dpsgd", "few", "banded", "blt", "adaptive", "exact"]
CASES = [*((kind, "plain") for kind in KINDS), ("dpsgd", "ddp"), *((kind, "fsdp") for kind in KINDS)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process, by plan."""
    folder = tmp_path_factory.mktemp("alone")
    return {kind: ranked.train(kind, dpfy.Run(folder / kind, seed=3)) for kind in KINDS}


@pytest.fixture(scope="module", params=[2, 4])
def together(request, tmp_path_factory):
    """The number of ranks, and the folder of their runs."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    ranked.start(ranked.cases, request.param, str(folder), CASES).join(120)
    return request.param, folder


@pytest.mark.parametrize(("kind", "wrap"), CASES)
def test_ranks_make_the_run_of_one_process(alone, together, kind, wrap):
    ranks, folder = together
    found = ranked.results(folder, f"{kind}-{wrap}", ranks)
    for mine in found:
        for name, value in alone[kind].items():
            if name == "past":
                continue
            if isinstance(value, float):
                assert abs(mine[name] - value) < 1e-9
            elif kind != "exact":  # whose shards draw from streams of their own
                assert (mine[name] - value).abs().max() < 1e-9
            assert not isinstance(value, torch.Tensor) or torch.equal(mine[name], found[0][name])
    assert sum(mine["past"] for mine in found) == alone[kind]["past"]
