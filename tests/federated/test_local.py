"""Local training: many clients at once as each by itself, one step as DP-SGD over users, and what a
client's update may depend on.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.randomness import Randomness
from dpfy.data.users import UserRecords
from dpfy.federated import CLIENT, LocalTraining, LocalUpdates
from dpfy.federated import fit as federated_fit
from dpfy.federated.folded import chain
from dpfy.federated.local import side_by_side
from dpfy.federated.tiled import stages
from dpfy.gradients.clip import QuantileClip
from dpfy.training import Update
from dpfy.training.objective import Objective

SECRET = Randomness.for_tests(4)
pytestmark = pytest.mark.filterwarnings("ignore:run .*")


def clients(users: int = 30, most: int = 9, dtype=torch.float64) -> UserRecords:
    """Clients with 1 to `most` records, each with labels of its own taste."""
    rng = np.random.default_rng(2)
    owners = np.concatenate([np.full(1 + user % most, user) for user in range(users)])
    x = rng.normal(size=(len(owners), 1, 6, 6))
    y = (x[:, 0, 0, :3].argmax(1) + owners) % 4
    return dpfy.by_user((torch.from_numpy(x).to(dtype), torch.from_numpy(y)), owners, most)


def net(dtype=torch.float64, activation=nn.Tanh) -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.GroupNorm(1, 3),
        activation(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    return nn.Sequential(*layers).to(dtype)


def plan(data: UserRecords, rounds: int = 5, noise: float = 1.0, unit=None) -> dpfy.Plan:
    return dpfy.dpsgd(
        len(data), 10, steps=rounds, clip_norm=0.2, unit=unit or data.unit
    ).with_noise(noise, delta=1e-3)


def updates(
    local: LocalTraining, which, data=None, step: int = 3, model=None
) -> dict[str, torch.Tensor]:
    made = LocalUpdates(model or net(), data or clients(), local, Objective(), SECRET)
    return made(step, np.asarray(which, np.int64))


WAYS = [
    LocalTraining(10, 4, 0.3),
    LocalTraining(3, None, 0.5),
    LocalTraining(4, 20, 0.3),
    LocalTraining(4, 2, method="fedsgd"),
]


def folding() -> nn.Module:
    """A chain of plain layers, which is folded; the other nets go through vmap."""
    torch.manual_seed(1)
    head = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
    )
    return nn.Sequential(
        head, nn.Tanh(), nn.Flatten(), nn.Linear(24, 8), nn.GELU(), nn.Linear(8, 4, bias=False)
    ).double()


def tiling() -> nn.Module:
    """A chain that goes by products over tiles."""
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("model", [net, folding, tiling])
@pytest.mark.parametrize("local", WAYS, ids=str)
def test_many_clients_at_once_are_each_by_itself(local, model):
    everyone = range(30)
    slow = updates(replace(local, way="loop"), everyone, model=model())
    for at_once in (1, 7, None):
        fast = updates(replace(local, at_once=at_once), everyone, model=model())
        for name, rows in slow.items():
            assert rows.shape[0] == 30
            assert float((fast[name] - rows).abs().max()) < 1e-9 * max(1.0, float(rows.abs().max()))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model", [folding, tiling])
def test_clients_side_by_side_in_threads_are_each_by_itself(model, three_threads):
    local, everyone = LocalTraining(4, 3, 0.3), np.arange(30)
    made = LocalUpdates(model(), clients(), local, Objective(), SECRET)
    slow = updates(replace(local, way="loop"), everyone, model=model(), step=3)
    for at_once in (1, 4, None):
        made._local = replace(local, at_once=at_once)
        assert all(
            torch.allclose(rows, slow[name], rtol=0, atol=1e-9)
            for name, rows in made(3, everyone).items()
        )
        assert torch.get_num_threads() == 3


def test_parts_are_shared_by_threads_and_what_one_refuses_is_refused(three_threads):
    together, seen = threading.Barrier(3), []

    def part(place: slice) -> None:
        together.wait(timeout=30)  # passes only if three are under way at once
        seen.append((place, torch.get_num_threads()))

    side_by_side(part, [slice(i, i + 1) for i in range(6)], 3)
    assert sorted(place.start for place, _ in seen) == list(range(6))
    assert {threads for _, threads in seen} == {1}

    def refuses(place: slice) -> None:
        raise dpfy.InvalidInput("labels", "a class outside", "must be one of the outputs")

    with pytest.raises(dpfy.InvalidInput, match="a class outside"):
        side_by_side(refuses, [slice(0, 1), slice(1, 2)], 2)
    assert torch.get_num_threads() == 3


def test_functions_of_the_caller_are_called_by_the_callers_thread(three_threads):
    callers = set()

    def loss(outputs, targets):
        callers.add(threading.get_ident())
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    LocalUpdates(tiling(), clients(), LocalTraining(2, 3, at_once=4), Objective(loss), SECRET)(
        0, np.arange(30)
    )
    assert callers == {threading.get_ident()}


def test_the_loop_is_sgd_as_anyone_would_write_it():
    """Against torch's own optimizer on a copy of the model, with all records of a client."""
    data, local = clients(), LocalTraining(4, None, 0.3)
    found = updates(local, [5, 11], data)
    for row, client in enumerate((5, 11)):
        x, y, real = (t[client] for t in data.tensors)
        mine, start = net(), dict(net().named_parameters())
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.3)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(mine(x[real]), y[real]).backward()
            optimizer.step()
        for name, p in mine.named_parameters():
            assert torch.allclose(start[name] - p, found[name][row], atol=1e-9)


def test_an_update_depends_on_its_own_client_alone():
    local, alone = LocalTraining(6, 3, 0.3), updates(LocalTraining(6, 3, 0.3), [7])
    for others in ([7, 8], [0, 7], range(30)):
        together = updates(local, others)
        row = list(others).index(7)
        assert all(torch.allclose(together[n][row], alone[n][0], atol=1e-12) for n in alone)
    poisoned = clients()
    poisoned.tensors[0][8] = float("nan")
    together = updates(local, [7, 8], poisoned)
    assert all(torch.allclose(together[n][0], alone[n][0], atol=1e-12) for n in alone)
    assert not all(t[1].isfinite().all() for t in together.values())


def test_rounds_draw_other_minibatches_and_a_minibatch_holds_no_record_twice():
    data = clients()
    made = LocalUpdates(net(), data, LocalTraining(5, 4), Objective(), SECRET)
    taken, counts = made._minibatches(0, np.arange(30))
    other, _ = made._minibatches(1, np.arange(30))
    assert not torch.equal(taken, other)
    sizes = data.tensors[-1].sum(1)
    for client in range(30):
        for places, real in zip(taken[client], counts[client], strict=True):
            kept = places[real].tolist()
            assert len(kept) == len(set(kept)) == min(4, int(sizes[client]))
            assert max(places.tolist()) < sizes[client]


def dpsgd_over_users(data, the_plan, folder, rate=1.0):
    """DP-SGD over users as level two makes it: the mean loss of a user's records, clipped once."""
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpfy.PrivateTraining(
        model, optimizer, data, the_plan, dpfy.Run(folder, seed=8)
    ) as training:
        for x, y, real in training.batches():
            each = nn.functional.cross_entropy(
                model(x.flatten(0, 1)), y.flatten(0, 1), reduction="none"
            )
            training.step(rate * dpfy.per_user(each, real, reduction="mean"))
    return model


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_one_local_step_is_dpsgd_over_users_bit_for_bit(tmp_path, method):
    data = clients(dtype=torch.float32)
    reference = dpsgd_over_users(data, plan(data), tmp_path / "sgd")
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    local = LocalTraining(1, method=method)
    result = federated_fit(
        model,
        data,
        plan=plan(data),
        optimizer=optimizer,
        local=local,
        run=dpfy.Run(tmp_path / "avg", seed=8),
    )
    assert result.epsilon == pytest.approx(plan(data).epsilon)
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))


def test_one_local_step_through_the_rounds_is_dpsgd_over_users_too(tmp_path):
    """The same step by stacked weights: a minibatch as large as any client, so that the general way
    is taken.
    """
    data = clients()
    reference = net()
    at = {"lr": 0.5}
    with dpfy.PrivateTraining(
        reference,
        torch.optim.SGD(reference.parameters(), **at),
        data,
        plan(data),
        dpfy.Run(tmp_path / "sgd", seed=8),
    ) as training:
        for x, y, real in training.batches():
            each = nn.functional.cross_entropy(
                reference(x.flatten(0, 1)), y.flatten(0, 1), reduction="none"
            )
            training.step(0.7 * dpfy.per_user(each, real, reduction="mean"))
    model = net()
    federated_fit(
        model,
        data,
        plan=plan(data),
        optimizer=torch.optim.SGD(model.parameters(), **at),
        local=LocalTraining(1, 9, 0.7),
        run=dpfy.Run(tmp_path / "avg", seed=8),
    )
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)


def test_a_simulated_federation_is_resumed_to_the_same_bits(tmp_path):
    data = clients(dtype=torch.float32)
    local, clip = LocalTraining(4, 3, 0.3), QuantileClip(0.2)
    the_plan = replace(dpfy.dpsgd(len(data), 10, steps=6, unit=CLIENT), clip=clip).with_noise(
        1.0, delta=1e-3
    )

    def trained(folder, stop=0, local=local, data=data, resume=True, every=float("inf")):
        model = net(torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        run = dpfy.Run(folder, seed=8, resume=resume, checkpoint_every=every)
        left = [
            stop
        ]  # in a list: what changes is not part of the code that a resumed run must share

        def schedule(step):
            return 1.0 - 0.01 * step

        def losses(outputs, targets):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return nn.functional.cross_entropy(outputs, targets, reduction="none")

        federated_fit(
            model,
            data,
            plan=the_plan,
            optimizer=optimizer,
            local=local,
            loss=losses,
            run=run,
            update=Update(0.9, schedule),
        )
        return model

    whole = trained(tmp_path / "whole")
    for every, words in ((float("inf"), "resume step 0"), (0.0, "resume local")):
        cut = tmp_path / f"cut {every}"
        with pytest.raises(KeyboardInterrupt):
            trained(cut, 14, every=every)
        with pytest.raises(dpfy.InvalidInput, match=words):
            trained(cut, local=replace(local, learning_rate=0.2), every=every)
        with pytest.raises(dpfy.InvalidInput, match=words):
            trained(
                cut,
                data=replace(data, tensors=(data.tensors[0] + 1, *data.tensors[1:])),
                every=every,
            )
        again = trained(cut, every=every)
        assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))
        assert all(found.holds for found in dpfy.verify(cut))
        done = trained(cut)  # finished before: the released weights
        assert all(map(torch.equal, whole.state_dict().values(), done.state_dict().values()))


@pytest.mark.parametrize("unit", ["client", "user"])
@pytest.mark.parametrize(
    "local", [LocalTraining(), LocalTraining(3, 2, 0.3)], ids=["gradient", "steps"]
)
def test_the_card_of_a_simulation_says_whose_data_it_protects(tmp_path, unit, local):
    data = clients(dtype=torch.float32)
    model, the_unit = net(torch.float32), CLIENT if unit == "client" else data.unit
    result = federated_fit(
        model,
        data,
        plan=plan(data, 2, unit=the_unit),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        local=local,
        run=tmp_path / "run",
        evaluation=dpfy.PublicTest((torch.zeros(3, 1, 6, 6), torch.zeros(3, dtype=torch.int64))),
    )
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["unit"]["name"] == unit
    assert set(result.utility) == {"test_loss", "test_accuracy"}
    assert all(found.holds for found in dpfy.verify(tmp_path / "run"))


def test_what_cannot_be_a_federation_is_refused(tmp_path):
    data, model = clients(dtype=torch.float32), net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(dpfy.InvalidInput, match="by_user"):
        federated_fit(model, data.tensors[:2], plan=plan(data), optimizer=optimizer)
    with pytest.raises(dpfy.InvalidInput, match="plan unit"):
        federated_fit(model, data, plan=plan(data, unit=dpfy.Unit()), optimizer=optimizer)
    with pytest.raises(dpfy.InvalidInput, match="most_records"):
        federated_fit(model, data, plan=plan(data, unit=dpfy.Unit("user", 5)), optimizer=optimizer)
    with pytest.raises(dpfy.InvalidInput, match=r"local\.learning_rate"):
        LocalTraining(3, method="fedsgd", learning_rate=0.5)
    with pytest.raises(dpfy.InvalidInput, match=r"local\.steps"):
        LocalTraining(0)


class Own(nn.Linear):
    """A layer that does something of its own."""


def test_only_chains_of_plain_layers_in_their_order_are_folded():
    assert [name for name, _ in chain(folding(), 3)][:4] == ["0.0", "0.1", "0.2", "0.3"]
    assert stages(chain(folding(), 3)) is None
    assert len(stages(chain(tiling(), 3)) or []) == 3
    assert chain(nn.Sequential(nn.Linear(3, 2)), 1) is not None
    assert chain(nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), 2) is not None
    assert chain(nn.Sequential(nn.Linear(3, 2)), 3) is None  # of the last dimension of an image
    assert chain(folding(), 1) is None
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked[0].register_forward_hook(lambda *_: None)
    others = [
        net(),
        hooked,
        nn.Linear(3, 2),
        nn.Sequential(Own(3, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(9, 9), nn.Conv2d(1, 1, 1)),
        nn.Sequential(nn.Conv2d(1, 1, 2), nn.Linear(3, 2)),
        nn.Sequential(nn.Conv2d(1, 1, 2, padding_mode="circular")),
        nn.Sequential(nn.Flatten(2)),
        nn.Sequential(nn.Conv2d(1, 1, 2)),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)),
    ]
    assert all(chain(model, 3) is None for model in others)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 4)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        return out * 2 if float(out.detach().sum()) > 0 else out


def test_a_model_that_cannot_be_batched_says_the_way_out_and_the_loop_takes_it():
    model = Branching().double()
    with pytest.raises(dpfy.Unsupported, match='way="loop"'):
        updates(LocalTraining(2, 3), range(4), model=model)
    assert updates(LocalTraining(2, 3, way="loop"), range(4), model=model)[
        "layer.weight"
    ].shape == (4, 4, 36)
