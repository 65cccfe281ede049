"""Virtual clients: whose records they hold, what the card may call them, and what holds for a
user.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.accounting.user_level import of_group
from dpfy.federated import CLIENT, LocalTraining, grouped, parted
from dpfy.federated import fit as federated_fit

OWNERS = np.array([7, 7, 7, 7, 3, 9, 9, 1, 1, 1, 7, 3])
X = torch.arange(12.0)[:, None]
Y = torch.arange(12) % 2


def held(clients) -> list[list[int]]:
    """The records of each virtual client, by number."""
    x, _, real = clients.tensors
    return [x[c][real[c]].flatten().int().tolist() for c in range(len(x))]


def test_groups_hold_whole_users_and_no_user_is_in_two():
    clients = grouped((X, Y), OWNERS, 3, together=2)
    assert held(clients) == [
        [4, 7, 8, 9, 11],
        [0, 1, 2, 5, 6],
    ]  # users 1 and 3; users 7 (its first three) and 9
    assert clients.unit.name == "virtual client (a group of up to 2 users)"
    assert (clients.unit.most_records, clients.parts) == (6, 1)


def test_parts_deal_out_the_records_of_a_user():
    clients = parted((X, Y), OWNERS, 2, parts=3)
    parts = held(clients)
    assert sorted(k for part in parts for k in part) == list(range(12))
    owners = [{int(OWNERS[k]) for k in part} for part in parts]
    assert all(len(who) == 1 for who in owners)
    assert max(owners.count(who) for who in owners) == 3 == clients.parts
    assert clients.unit.name == "virtual client (one of up to 3 parts of a user)"


def test_adding_a_user_moves_no_other_ones_records_between_parts():
    before = held(parted((X, Y), OWNERS, 2, parts=2))
    more = parted(
        (torch.cat([X, X[:2] + 100]), torch.cat([Y, Y[:2]])), np.append(OWNERS, [5, 5]), 2, parts=2
    )
    assert [part for part in held(more) if max(part) < 100] == before


def test_the_card_says_virtual_client_and_a_plan_for_users_is_refused(tmp_path):
    clients = parted(
        (X.repeat(4, 3), Y.repeat(4)),
        np.tile(OWNERS, 4) + np.repeat([0, 20, 40, 60], 12),
        2,
        parts=2,
    )
    recipe = dpfy.dpsgd(len(clients), 8, steps=2, unit=clients.unit)
    plan = recipe.calibrate(4.0, 1e-3, group=clients.parts)
    both = dpfy.accounting.epsilon(of_group(plan.event, 2), 1e-3, adjacency=recipe.adjacency)
    assert plan.epsilon < both <= 4.0 + 1e-6  # a user, all parts together
    net = nn.Linear(3, 2)
    with pytest.raises(dpfy.InvalidInput, match="plan unit"):
        federated_fit(
            net,
            clients,
            plan=dpfy.dpsgd(len(clients), 8, steps=2, unit=CLIENT).with_noise(1.0, delta=1e-3),
            optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        )
    federated_fit(
        net,
        clients,
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        local=LocalTraining(2, 2, 0.1),
        run=tmp_path / "run",
    )
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["unit"]["name"] == "virtual client (one of up to 2 parts of a user)"
