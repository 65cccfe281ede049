"""A table by a network: what is asked is checked, and handed to the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfy.core.errors import InvalidInput
from dpfy.runs.run import Progress, Run
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
from dpfy.synthetic.run import one_thread
from dpfy_lab.gans import gan, teachers

METHODS = {"dp-gan": gan.execute, "pate-gan": teachers.execute}


def execute(
    data: Any,
    domain: Domain,
    terms: SynthesisTerms,
    options: SynthesisOptions,
    place: Run,
    public: Any,
    progress: Progress,
) -> Path:
    """The finished folder of a synthesis by a network."""
    way_out = (
        f"is for methods that measure marginals, aim or mst say; {options.method} trains a network"
    )
    for field, given in (
        ("workload", options.workload),
        ("target", options.target),
        ("public", public),
        ("user", terms.user),
    ):
        if given is not None:
            raise InvalidInput(
                field, given if isinstance(given, str | int) else type(given).__name__, way_out
            )
    if options.method == "pate-gan" and options.device != "cpu":
        raise InvalidInput("device", options.device, "must be cpu for pate-gan")
    with one_thread():
        return METHODS[options.method](data, domain, terms, options, place, progress)
