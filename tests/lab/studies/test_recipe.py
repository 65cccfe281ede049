"""Our recipe: what one record adds to the moments is bounded, the maps do what they say, the bill
is that of both releases.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.training import Update
from dpfy_lab.studies import images
from dpfy_lab.studies.sweep import LENGTH, MOMENTUM, Setting, sweep
from dpfy_lab.whitening import maps
from dpfy_lab.whitening.maps import RandomFeatures, Whitening, sums, unit


def correlated(records: int, channels: int = 6, places: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(records, channels, places, generator=generator)
    return (
        torch.diag(torch.linspace(0.2, 3, channels))
        @ x
        @ torch.diag(torch.linspace(0.5, 2, places))
        + 0.7
    )


@pytest.mark.parametrize("kind", ["random", "one channel", "one place", "equal", "single"])
def test_one_record_adds_at_most_the_bound(kind: str) -> None:
    x = torch.zeros(1, 81, 49)
    if kind == "random":
        x = torch.randn(1, 81, 49, generator=torch.Generator().manual_seed(0))
    elif kind == "one channel":
        x[:, 4] = 1
    elif kind == "one place":
        x[:, :, 7] = 1
    elif kind == "equal":
        x += 1
    else:
        x[0, 2, 3] = -5
    added = torch.cat([v.flatten() for v in sums(unit(x)).values()]).double().norm()
    assert added <= maps.BOUND
    if kind == "single":
        assert added == pytest.approx(
            math.sqrt(3), rel=1e-5
        )  # the bound is attained: it could not be smaller


def test_sums_are_sums_and_symmetric_matrices_keep_their_norm() -> None:
    x = unit(correlated(40))
    parts = [sums(row.unsqueeze(0)) for row in x]
    for name, total in sums(x, chunk=7).items():
        torch.testing.assert_close(total, sum(part[name] for part in parts), rtol=1e-5, atol=1e-5)
    matrix = torch.einsum("ncp,ndp->cd", x, x)
    assert sums(x)["channels"].norm() == pytest.approx(float(matrix.norm()), rel=1e-5)
    torch.testing.assert_close(maps._unpacked(sums(x)["channels"]), matrix, rtol=1e-5, atol=1e-5)


def test_full_whitening_makes_channels_and_places_round() -> None:
    x = unit(correlated(4000))
    plain = Whitening.from_sums(sums(x), len(x), 0.0, 0.0)
    white = Whitening.from_sums(sums(x), len(x), 1.0, 0.0)

    def condition(rows: torch.Tensor) -> float:
        shaped = rows.view(-1, 6, 5)
        values = torch.linalg.eigvalsh(torch.einsum("ncp,ndp->cd", shaped, shaped))
        return float(values[-1] / values[0])

    assert condition(plain(x)) > 20
    assert condition(white(x)) < 2
    assert float(white(x).mean(0).norm()) < 0.1
    torch.testing.assert_close(white(x).norm(dim=1), torch.ones(len(x)))
    torch.testing.assert_close(
        white(x[5:6]), white(x)[5:6], rtol=1e-4, atol=1e-5
    )  # a row depends on itself alone


def test_waves_are_a_gaussian_kernel_without_its_constant() -> None:
    x = unit(torch.randn(6, 20, generator=torch.Generator().manual_seed(1)))
    waves = RandomFeatures(60_000, 1.3)(x)
    kernel = math.exp(-1 / 1.3**2) * (torch.exp(x @ x.T / 1.3**2) - 1)
    expected = kernel / kernel.diagonal().sqrt().outer(kernel.diagonal().sqrt())
    assert float((waves @ waves.T - expected).abs().max()) < 0.03


@pytest.mark.parametrize("epsilon", [1.0, 1.68, 3.0])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_both_releases_together_keep_the_promise_and_waste_nothing(
    epsilon: float, share: float
) -> None:
    recipe = images.HeadRecipe(share, 0.5, 0, 0.0, Setting(700, 0.2, 8.0, 0.0, 0.98))
    moments, steps = images.noise_of(recipe, epsilon)
    event = events.Composed(
        (events.Gaussian(moments), events.Repeated(events.Gaussian(steps), 700))
    )
    billed = accounting.epsilon(event, images.DELTA)
    assert 0.9999 * epsilon < billed <= epsilon


def test_the_sweep_moves_as_training_does() -> None:
    """Without noise the sweep and a private run with noise 0 give the same head, so a setting means
    the same in both.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = (
        unit(torch.randn(300, 12, generator=generator)),
        torch.randint(10, (300,), generator=generator),
    )
    test = (
        unit(torch.randn(2000, 12, generator=generator)),
        torch.randint(10, (2000,), generator=generator),
    )
    setting = Setting(25, 0.3, 6.0, 0.5, 0.9)
    head = torch.nn.Linear(12, 10)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    optimizer = torch.optim.SGD(head.parameters(), lr=setting.learning_rate, momentum=MOMENTUM)
    plan = dpfy.dpsgd(300, 300, steps=25, clip_norm=setting.clip_norm).with_noise(0.0)
    result = _trained(
        head, optimizer, (LENGTH * x, y), plan, Update(setting.average, setting.schedule)
    )
    with torch.no_grad():
        guesses = result(LENGTH * test[0]).argmax(1)
    marked = test[0], guesses  # the sweep must agree with the trained head on nearly every record
    (agreement,) = sweep((x, y), marked, [setting], [1e12], seed=0)
    assert agreement > 0.995
    other = Setting(25, 0.01, 6.0, 0.5, 0.9)
    assert sweep((x, y), marked, [other], [1e12], seed=0)[0] < 0.99


def _trained(
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: object,
    plan: dpfy.Plan,
    update: Update,
) -> torch.nn.Module:
    import tempfile

    with (
        tempfile.TemporaryDirectory() as folder,
        dpfy.PrivateTraining(
            head, optimizer, data, plan, f"{folder}/run", update=update
        ) as training,
    ):
        for x, y in training.batches():
            training.step(functional.cross_entropy(head(x), y, reduction="none"))
        average = {name: value.clone() for name, value in training.average.items()}
    head.load_state_dict(average)
    return head


@pytest.mark.parametrize("waves", [0, 64])
def test_a_whole_run_is_billed_for_both_releases(
    monkeypatch: pytest.MonkeyPatch, waves: int
) -> None:
    """On made-up features that a linear model can tell apart: the run learns, and epsilon is that
    of moments and steps together.
    """
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(600) % 10
    centres = torch.randn(10, 9, 4, generator=generator)
    features = unit(centres[labels] + 0.3 * torch.randn(600, 9, 4, generator=generator))
    monkeypatch.setattr(images, "RECORDS", 500)
    monkeypatch.setattr(
        images,
        "extracted",
        lambda data, options: (features[:500], labels[:500], features[500:], labels[500:]),
    )
    recipe = images.HeadRecipe(0.1, 0.5, waves, 1.0, Setting(30, 0.2, 4.0, 0.0, 0.9))
    options = images.Options()
    found = images.run_one("mnist", 8.0, 0, recipe, options)
    assert 0.999 * 8 < found["epsilon"] <= 8
    assert found["test_accuracy"] > 0.5
    again = images.run_one("mnist", 8.0, 0, recipe, options)
    assert again["test_accuracy"] == found["test_accuracy"]  # a fixed seed repeats the run
