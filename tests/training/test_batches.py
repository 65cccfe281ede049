"""The batches of a run: any structure, a length, and the same bits whatever holds the tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.batch import leaves, placed, plain

sys.path.insert(0, str(Path(__file__).parent))
import small

X, Y = small.data()


def released(
    train: object, path: Path, losses_of: Any, *, captured: bool = False, steps: int = 6
) -> dict[str, torch.Tensor]:
    """The weights after a few private steps of the small model, seeded."""
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(max_physical_batch=12)
    with dpfy.PrivateTraining(
        net, optimizer, train, small.plan(steps), dpfy.Run(path, seed=5), runtime=runtime
    ) as training:
        step = training.captured(lambda batch: losses_of(net, batch))
        for batch in training.batches():
            step(batch) if captured else training.step(losses_of(net, batch))
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def of_pair(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1], reduction="none")


def of_dict(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(net(batch["in"][0]), batch["label"], reduction="none")


@pytest.mark.parametrize("captured", [False, True])
def test_a_nested_batch_releases_the_bits_of_a_flat_one(tmp_path: Path, captured: bool) -> None:
    flat = released((X, Y), tmp_path / "flat", of_pair)
    nested = released({"in": [X], "label": Y}, tmp_path / "nested", of_dict, captured=captured)
    assert flat.keys() == nested.keys()
    assert all(torch.equal(flat[name], nested[name]) for name in flat)


def test_examples_that_mix_are_found_in_a_nested_batch(tmp_path: Path) -> None:
    def centred(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        x = batch["in"][0]
        return functional.cross_entropy(net(x - x.mean(0)), batch["label"], reduction="none")

    with pytest.raises(Unsupported, match="example"):
        released({"in": [X], "label": Y}, tmp_path / "mixed", centred)


def test_the_length_is_the_steps_that_remain(tmp_path: Path) -> None:
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(
        net, optimizer, (X, Y), small.plan(6), dpfy.Run(tmp_path / "run", seed=5)
    ) as training:
        batches = training.batches()
        assert len(batches) == 6
        for x, y in batches:
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            assert len(batches) == len(training.batches()) == 6 - training.steps_done
        assert len(batches) == 0


def test_a_collated_batch_is_made_plain() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    batch = plain("batch", {"a": whole[:2], "b": (whole[:2, 1:].numpy(), None)}, 2)
    assert [t.tolist() for t in leaves(batch)] == [[[0, 1, 2], [3, 4, 5]], [[1, 2], [4, 5]]]
    assert all(t.untyped_storage().nbytes() == t.numel() * 4 for t in leaves(batch))
    assert placed(batch, "cpu")["b"][1] is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": ["anna", "bert"]}, r"batch\['id'\]\[0\]: got 'str'; a batch holds tensors alone"),
        (
            (torch.zeros(2), torch.tensor(7)),
            r"batch\[1\]: got 'shape \[\]'; must have a row for each of the 2 records",
        ),
        (
            (torch.zeros(3, 2),),
            r"batch\[0\]: got 'shape \[3, 2\]'; must have a row for each of the 2 records",
        ),
        (
            (torch.eye(2).to_sparse(),),
            r"batch\[0\]: got 'a tensor of layout torch.sparse_coo'; must be dense",
        ),
        ({"n": 5}, r"batch\['n'\]: got 'int'"),
    ],
)
def test_what_the_watch_could_not_replace_is_refused_without_its_value(
    value: object, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        plain("batch", value, 2)
    assert "anna" not in str(caught.value)
