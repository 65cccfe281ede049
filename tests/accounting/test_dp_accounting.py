"""The reference accountants give the published numbers, refuse what they cannot bill, and translate
events without loss.
"""

from __future__ import annotations

import logging
import math

import pytest

from dpfy import accounting
from dpfy.accounting.dp_accounting_adapter import PeerPld, PeerRdp, from_peer, to_peer
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.unit import Adjacency

STEP = ev.PoissonSampled(0.005, ev.Gaussian(1.0))


def test_published_numbers() -> None:
    event = ev.Repeated(STEP, 200)
    assert 0.5867 <= accounting.epsilon(event, 1e-6, accountant="pld") <= 0.5870
    assert 1.21 <= accounting.epsilon(event, 1e-6, accountant="rdp") <= 1.22


def test_the_reference_rdp_composes_without_warnings_and_leaves_the_logger_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from dp_accounting import rdp

    event, logger = (
        ev.Repeated(ev.PoissonSampled(0.5, ev.Gaussian(20.0)), 10),
        logging.getLogger("absl"),
    )
    logger.setLevel(logging.WARNING)  # a verification before this test may have asked for less
    plain = rdp.RdpAccountant().compose(to_peer(event))
    loud, level = len(caplog.records), logger.level
    curve = PeerRdp().curve(event, Adjacency.ADD_OR_REMOVE_ONE)
    assert loud > 0
    assert len(caplog.records) == loud
    assert logger.level == level
    assert curve.epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_pld_refuses_deltas_it_under_reports_and_counts_it_ignores() -> None:
    with pytest.raises(Unsupported, match="tight"):
        accounting.epsilon(ev.Repeated(STEP, 200), 1e-10, accountant="pld")
    with pytest.raises(Unsupported, match="tight"):
        accounting.curve(
            ev.Repeated(ev.RandomizedResponse(0.5), 10),
            adjacency=Adjacency.REPLACE_ONE,
            accountant="pld",
        )


@pytest.mark.parametrize(
    "event",
    [
        ev.Nothing(),
        ev.NotPrivate(),
        ev.Laplace(2.0),
        ev.DiscreteLaplace(0.5, 2),
        ev.RandomizedResponse(0.3, 4),
        ev.MixtureOfGaussians(2.0, (0.0, 1.0), (0.75, 0.25)),
        ev.Zcdp(0.1, 0.0),
        ev.Repeated(STEP, 7),
        ev.Composed((STEP, ev.Gaussian(3.0))),
        ev.SampledWithoutReplacement(100, 10, ev.Gaussian(1.0)),
        ev.SampledWithReplacement(100, 10, ev.Gaussian(1.0)),
        ev.TruncatedPoissonGaussian(100, 0.1, 20, 1.0),
        ev.RepeatAndSelect(STEP, 10.0, math.inf),
    ],
)
def test_translation_is_lossless(event: ev.Event) -> None:
    assert from_peer(to_peer(event)) == event


def test_bad_input_names_field_value_and_rule() -> None:
    with pytest.raises(InvalidInput, match=r"accountant.*'rpd'.*did you mean 'rdp'"):
        accounting.accountant("rpd")
    with pytest.raises(InvalidInput, match="delta"):
        accounting.epsilon(STEP, 0.0)
    with pytest.raises(DpfyError, match="EpsilonDelta"):
        accounting.epsilon(ev.EpsilonDelta(1.0), 1e-6, accountant="pld")


def test_exact_divergences_are_never_above_the_reference_and_close_below() -> None:
    from dpfy.accounting.dp_accounting_adapter import PeerRdp
    from dpfy.accounting.rdp import Rdp

    for event in (
        ev.Repeated(STEP, 200),
        ev.Gaussian(2.0),
        ev.Laplace(3.0),
        ev.RepeatAndSelect(ev.Repeated(STEP, 200), 10.0, 1.0),
    ):
        ours, theirs = (
            a.curve(event, Adjacency.ADD_OR_REMOVE_ONE).epsilon(1e-6) for a in (Rdp(), PeerRdp())
        )
        assert ours <= theirs * (1 + 1e-8)
        assert (
            ours >= theirs * 0.98
        )  # more large orders: nearer to the pure epsilon of Laplace noise


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [(113667.0, 0.02, 519015922968), (1.2, 1e-9, 4294967296), (1e12, 1e-12, 10**9)],
)
def test_pld_refuses_steps_that_it_would_count_for_minutes(
    noise: float, rate: float, steps: int
) -> None:
    event = ev.Repeated(ev.PoissonSampled(rate, ev.Gaussian(noise)), steps)
    with pytest.raises(Unsupported, match=f"{steps} steps by dp-accounting's PLD"):
        PeerPld().curve(event, Adjacency.ADD_OR_REMOVE_ONE)


@pytest.mark.parametrize(
    "event",
    [
        ev.PoissonSampled(1e-3, ev.Gaussian(0.06)),
        ev.Repeated(ev.Gaussian(1.0), 400),
        ev.Laplace(0.005),
    ],
)
def test_pld_refuses_losses_that_it_would_grid_for_minutes(event: ev.Event) -> None:
    with pytest.raises(
        Unsupported,
        match=r"its grid of 1e-4 is too long\) is not supported; use --accountant tight",
    ):
        PeerPld().curve(event, Adjacency.ADD_OR_REMOVE_ONE)
