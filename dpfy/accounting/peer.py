"""Our events and dp-accounting's, translated both ways. dp-accounting is imported only when one of these functions is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpfy.accounting.table import way_out
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise Unsupported(
            "the dp-accounting library, which is not installed here,", "install dp-accounting or use --accountant tight"
        ) from None
    return dp_accounting


def relation(adjacency: Adjacency) -> Any:
    """dp-accounting's name for `adjacency`."""
    relations = _library().NeighboringRelation
    return {
        Adjacency.ADD_OR_REMOVE_ONE: relations.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: relations.REPLACE_ONE,
        Adjacency.ZERO_OUT: relations.REPLACE_SPECIAL,
    }[adjacency]


def to_peer(event: Event) -> Any:
    """The dp-accounting event of the same meaning.

    Guarantees: field by field the same mechanism; an event that dp-accounting has no word for raises `Unsupported`.
    """
    d = _library().dp_event
    table: dict[type, Callable[[Any], Any]] = {
        ev.Nothing: lambda e: d.NoOpDpEvent(),
        ev.NotPrivate: lambda e: d.NonPrivateDpEvent(),
        ev.Gaussian: lambda e: d.GaussianDpEvent(e.noise_multiplier),
        ev.Laplace: lambda e: d.LaplaceDpEvent(e.noise_multiplier),
        ev.DiscreteLaplace: lambda e: d.DiscreteLaplaceDpEvent(e.noise_parameter, e.sensitivity),
        ev.RandomizedResponse: lambda e: d.RandomizedResponseDpEvent(e.noise_parameter, e.buckets),
        ev.GaussianMixture: lambda e: d.MixtureOfGaussiansDpEvent(e.standard_deviation, e.sensitivities, e.probabilities),
        ev.Zcdp: lambda e: d.ZCDpEvent(e.rho, e.xi),
        ev.PoissonSampled: lambda e: d.PoissonSampledDpEvent(e.rate, to_peer(e.event)),
        ev.SampledWithoutReplacement: lambda e: d.SampledWithoutReplacementDpEvent(
            e.source_size, e.sample_size, to_peer(e.event)
        ),
        ev.SampledWithReplacement: lambda e: d.SampledWithReplacementDpEvent(e.source_size, e.sample_size, to_peer(e.event)),
        ev.TruncatedPoissonGaussian: lambda e: d.TruncatedSubsampledGaussianDpEvent(
            e.source_size, e.rate, e.most, e.noise_multiplier
        ),
        ev.Repeated: lambda e: d.SelfComposedDpEvent(to_peer(e.event), e.count),
        ev.Composed: lambda e: d.ComposedDpEvent([to_peer(part) for part in e.events]),
        ev.RepeatAndSelect: lambda e: d.RepeatAndSelectDpEvent(to_peer(e.event), e.mean, e.shape),
    }
    if type(event) not in table:
        raise Unsupported(f"{type(event).__name__} in dp-accounting", way_out(event, "use --accountant tight or rdp"))
    return table[type(event)](event)


def from_peer(event: Any) -> Event:
    """Our event of the same meaning as the dp-accounting event `event`; an unknown one raises `Unsupported`."""
    d = _library().dp_event
    table: dict[Any, Callable[[Any], Event]] = {
        d.NoOpDpEvent: lambda e: ev.Nothing(),
        d.NonPrivateDpEvent: lambda e: ev.NotPrivate(),
        d.GaussianDpEvent: lambda e: ev.Gaussian(e.noise_multiplier) if e.noise_multiplier else ev.NotPrivate(),
        d.LaplaceDpEvent: lambda e: ev.Laplace(e.noise_multiplier) if e.noise_multiplier else ev.NotPrivate(),
        d.DiscreteLaplaceDpEvent: lambda e: ev.DiscreteLaplace(e.noise_parameter, e.sensitivity),
        d.RandomizedResponseDpEvent: lambda e: ev.RandomizedResponse(e.noise_parameter, e.num_buckets),
        d.MixtureOfGaussiansDpEvent: lambda e: ev.GaussianMixture(
            e.standard_deviation, tuple(e.sensitivities), tuple(e.sampling_probs)
        ),
        d.ZCDpEvent: lambda e: ev.Zcdp(e.rho, e.xi),
        d.PoissonSampledDpEvent: lambda e: ev.PoissonSampled(e.sampling_probability, from_peer(e.event)),
        d.SampledWithoutReplacementDpEvent: lambda e: ev.SampledWithoutReplacement(
            e.source_dataset_size, e.sample_size, from_peer(e.event)
        ),
        d.SampledWithReplacementDpEvent: lambda e: ev.SampledWithReplacement(
            e.source_dataset_size, e.sample_size, from_peer(e.event)
        ),
        d.TruncatedSubsampledGaussianDpEvent: lambda e: ev.TruncatedPoissonGaussian(
            e.dataset_size, e.sampling_probability, e.truncated_batch_size, e.noise_multiplier
        ),
        d.SelfComposedDpEvent: lambda e: ev.Repeated(from_peer(e.event), e.count),
        d.ComposedDpEvent: lambda e: ev.Composed(tuple(from_peer(part) for part in e.events)),
        d.RepeatAndSelectDpEvent: lambda e: ev.RepeatAndSelect(from_peer(e.event), e.mean, e.shape),
    }
    if type(event) not in table:
        raise Unsupported(f"the dp-accounting event {type(event).__name__}", "describe it with the events of dpfy.core.events")
    return table[type(event)](event)


def halve_noise(event: Event) -> Event:
    """`event` with every noise multiplier halved: replace-one as two contributions, for accountants that know sensitivity 1 only."""
    if isinstance(event, (ev.Gaussian, ev.Laplace)):
        return replace(event, noise_multiplier=event.noise_multiplier / 2)
    if isinstance(
        event, (ev.PoissonSampled, ev.SampledWithoutReplacement, ev.SampledWithReplacement, ev.Repeated, ev.RepeatAndSelect)
    ):
        return replace(event, event=halve_noise(event.event))
    if isinstance(event, ev.Composed):
        return ev.Composed(tuple(halve_noise(part) for part in event.events))
    return event
