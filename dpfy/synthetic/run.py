"""A synthetic table, from what is asked to the run folder: plan, reserve, count, measure, draw,
report. In this order.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpfy
from dpfy.core import plugins, storage
from dpfy.core.errors import InvalidInput, missing
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Person
from dpfy.report import card
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.synthetic.claim import DEGREES, FACTS, MEASUREMENTS, TABLE
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.counts import Marginals, count
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.estimate import MEAN
from dpfy.synthetic.methods import (
    METHODS,
    FittedModel,
    SynthesisMethod,
    SynthesisTask,
)
from dpfy.synthetic.plan import (
    DEFAULTS,
    MODEL_CELLS,
    SynthesisOptions,
    SynthesisPlan,
    SynthesisTerms,
    Workload,
    plan,
)
from dpfy.synthetic.releases import MarginalReleases
from dpfy.synthetic.rows import table_of
from dpfy.synthetic.start import public_potentials
from dpfy.synthetic.writing import allowed, written
from dpfy.text.corpus import Texts

SURE = 0.95
SHOWN = 40
"""Measured marginals that the report lists; all are in synthesis.json."""


@dataclass(frozen=True, repr=False)
class SynthesisResult(Released):
    """What a synthesis leaves: a finished run with the table, and what was measured."""

    facts: dict[str, Any] = field(repr=False)

    @property
    def table(self) -> Path:
        """The synthetic table."""
        return self.run / TABLE

    def to_frame(self) -> Any:
        """The synthetic table as a pandas frame."""
        try:
            import pandas
        except ImportError:
            raise missing("to_frame", "pandas") from None
        return pandas.read_csv(self.table)

    def _told(self) -> dict[str, Any]:
        names = ("method", "rows", "columns", "measured", "error")
        return {"table": str(self.table)} | {key: self.facts[key] for key in names}


def synthesize(
    data: Any,
    *,
    epsilon: float,
    delta: float | None = None,
    schema: Any = None,
    unit: Person | None = None,
    records: int | None = None,
    adjacency: str = "add-or-remove-one",
    method: str = DEFAULTS.method,
    workload: Workload = None,
    target: str | None = None,
    rows: int | None = None,
    most_cells: int = MODEL_CELLS,
    public: Any = None,
    device: str = "cpu",
    run: Run | str | Path | None = None,
    progress: Progress = quiet,
    **training: Any,
) -> Released:
    """Synthetic records like private ones, in a run folder that anyone can verify.

        table = dpfy.synthesize(people, epsilon=1.0)
        table.to_frame()

    Args:
        data: A `dpfy.Dataset`; or a CSV or Parquet file of any size, a table, arrays by column; or
            `dpfy.Texts`, for a language model trained privately and texts sampled from it.
        epsilon: What the synthesis costs.
        delta: Without it that of the data set, or the one that follows from `records`.
        schema, unit, records: What is public about `data` where it is no Dataset.
        adjacency: "replace-one" hides which record is replaced, where `records` is public; a data
            set with a ledger keeps to one adjacency for all of its releases.
        method: "aim" (best), "mst" (fast, for many columns), or one of dpfy-lab.
        workload: The marginals that matter: a number of columns, lists of names, or names with
            weights.
        target: The column that matters more than others.
        rows: How many rows, or texts, to make.
        most_cells: Limits the tables of the model.
        public: A public table of the same schema to start from.
        device: Where the arithmetic is done: "cpu" or "cuda".
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        progress: Told what is being done.
        training: For `dpfy.Texts`: batch_size, epochs, learning_rate, clip_norm, model, tokens.

    Returns:
        The result: `table`, `to_frame()`; of texts `texts` and `model`.

    Raises:
        InvalidInput: A setting is wrong, or not one of this kind of data.
        BudgetExceeded: The budget of the data set does not cover it.

    Guarantees: everything that can be refused for a public reason is, and the price is computed and
    reserved, before the data is opened. A synthesis that is refused spends nothing and leaves no
    folder. A process killed at any moment goes on to the same bits.

    Example:
        >>> import numpy as np
        >>> import dpfy
        >>> rng = np.random.default_rng(0)
        >>> rows = {"age": rng.uniform(0, 100, 300), "job": rng.choice(["clerk", "nurse"], 300)}
        >>> schema = [dpfy.Number("age", 0, 100, bins=4), dpfy.Category("job", ["clerk", "nurse"])]
        >>> people = dpfy.Dataset(rows, schema)
        >>> table = dpfy.synthesize(people, epsilon=1.0, delta=1e-5, method="mst", rows=20)
        >>> table.to_frame().shape
        (20, 2)
    """
    held = Dataset.of(data, schema, unit=unit, records=records)
    options = SynthesisOptions(method, workload, target, rows, most_cells, device)
    if isinstance(held.source, Texts):
        from dpfy.synthetic.text.run import synthesize_texts

        default = SynthesisOptions(rows=rows, device=device)
        if options != default or public is not None:
            rule = "must be left out with dpfy.Texts: they are for tables"
            raise InvalidInput("method, workload, target, most_cells, public", "given", rule)
        return synthesize_texts(held, epsilon, delta, rows, device, run, progress, training)
    for name in training:
        raise InvalidInput(name, "given", "is for dpfy.Texts, or no setting of a synthesis")
    chosen = held.rule(delta)
    person, replaced = held.unit, held.replaced(adjacency)
    terms = SynthesisTerms(
        epsilon,
        chosen.value,
        None if person is None else person.column,
        None if person is None else person.at_most,
        held.records if method == "dp-gan" else replaced,
    )
    return synthesize_table(
        held.source,
        schema=held.table_schema,
        terms=terms,
        run=held.run(run),
        options=options,
        public=public,
        progress=progress,
        delta_from=chosen.origin,
    )


def synthesize_table(
    data: Any,
    *,
    schema: Any,
    terms: SynthesisTerms,
    run: Run | str | Path,
    options: SynthesisOptions = DEFAULTS,
    public: Any = None,
    progress: Progress = quiet,
    delta_from: str = "given by the caller",
) -> SynthesisResult:
    """`synthesize` of a table, with its terms and its options as one value each.

    Guarantees: those of `synthesize`.
    """
    progress("planning", 0.0)
    _check_public(data, public)
    place = Run.of(run)
    method = METHODS.get(options.method) or plugins.find(plugins.SYNTHESIZERS, options.method)
    if not isinstance(method, SynthesisMethod):
        return finished(method(data, Domain.given(schema), terms, options, place, public, progress))
    made = plan(Domain.given(schema), terms, options)
    return execute(data, made, place, public, progress, delta_from)


def execute(
    data: Any,
    made: SynthesisPlan,
    place: Run,
    public: Any = None,
    progress: Progress = quiet,
    delta_from: str = "given by the caller",
) -> SynthesisResult:
    """The synthesis of a plan."""
    if complete(place, made.claim):
        return finished(Path(place.path))
    options = made.options
    start = () if public is None else public_potentials(public, made.domain, options.most_cells)
    with RunFolder(place, made.claim) as folder, one_thread():
        progress("counting", 0.0)
        key = folder.randomness.key("records of persons", 0, 32).hex()
        marginals = count(data, made.domain, made.weights, made.terms.owners, key, progress)
        _check_records(marginals, made.terms)
        folder.bind("counts", marginals.fingerprint())
        name = made.claim.name
        meter = MarginalReleases(
            made.claim, marginals, folder.begin(name), folder.randomness, folder.bind
        )
        task = SynthesisTask(
            made.domain,
            made.weights,
            meter,
            options.most_cells,
            made.terms.records,
            options.device,
            progress,
            start,
        )
        model = made.method.rule(task, made.method)
        progress("drawing rows", 1.0)
        rng = folder.randomness.generator("synthetic rows", 0)
        codes = allowed(made.domain, model.rows(options.rows or max(1, round(model.total)), rng))
        facts = _facts(made, meter, model, codes) | {"error": errors(meter, codes, model.total)}
        folder.write(TABLE, written(made.domain, codes, folder.randomness))
        folder.write(MEASUREMENTS, _kept(meter))
        folder.write(FACTS, json.dumps(facts, indent=1).encode())
        folder.tell(name, **_told(facts), delta_from=delta_from)
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=made.claim.releases))
    return finished(Path(place.path))


def finished(path: Path | str) -> SynthesisResult:
    """A finished synthesis."""
    path = Path(path)
    facts = storage.parsed_json(FACTS, storage.content(FACTS, path / FACTS))
    return SynthesisResult.read(path, facts=facts)


@contextmanager
def seeded(randomness: Randomness, name: str) -> Iterator[None]:
    """Weights that are drawn inside are a function of the run's secret: a run that begins again
    begins with the same.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(randomness.key(f"weights of the {name}", 0, 7), "little"))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of floats depend on the number of threads: with one, a run that is resumed computes the
    same.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_public(data: Any, public: Any) -> None:
    """Refuse the private table itself as the public one to start from."""
    files = all(isinstance(held, str | Path) for held in (data, public))
    same = (
        os.path.realpath(data) == os.path.realpath(public)
        if files
        else data is public and public is not None
    )
    if same:
        raise InvalidInput(
            "public",
            str(public) if files else "the private table",
            "must be another table than the private one",
        )


def _check_records(marginals: Marginals, terms: SynthesisTerms) -> None:
    if terms.records not in (None, marginals.records):
        rule = "is not the number of records in the data, which must be public to be given"
        raise InvalidInput("records", terms.records, rule)


def _kept(meter: MarginalReleases) -> bytes:
    """What was measured, for anyone who wants to fit another model to it."""
    from safetensors.torch import save

    held = {f"{step:04d}": m.values.contiguous() for step, m in enumerate(meter.released)}
    about = [{"columns": list(m.clique), "deviation": m.deviation} for m in meter.released]
    return save(held, {"measurements": json.dumps(about)})


def _facts(
    made: SynthesisPlan, meter: MarginalReleases, model: FittedModel, codes: Codes
) -> dict[str, Any]:
    """What may be published about the synthesis: all of it follows from what was released."""
    measured = [_measured(made.domain, m, codes) for m in meter.released]
    return {
        "method": made.method.words,
        "rows": len(codes),
        "columns": list(made.domain.names),
        "records_estimated": round(model.total, 1),
        "measured": len(measured),
        "choices_made": made.claim.choices - meter.choices,
        "model": dict(model.facts()),
        "marginals": measured,
    }


def _measured(domain: Domain, measurement: Any, codes: Codes) -> dict[str, Any]:
    """A marginal that was measured: how noisy, and how far the table can be from the records, at
    most, in 95 of 100 runs.

    |x - t| <= |y - t| + |y - x| for the counts x, the noisy counts y and the table's t; the L1 norm
    of Gaussian noise on n cells exceeds its mean by s with a chance of at most exp(-s^2 / (2 n
    deviation^2)), being sqrt(n)-Lipschitz.
    """
    cells, deviation = measurement.values.numel(), measurement.deviation
    noise = deviation * (MEAN * cells + math.sqrt(2 * cells * math.log(1 / (1 - SURE))))
    values = measurement.values.cpu().numpy()
    whole = max(float(values.sum()), 1.0)
    table = table_of(codes, measurement.clique, values.shape) * (whole / max(len(codes), 1))
    seen = float(np.abs(values - table).sum())
    return {
        "columns": [domain.names[v] for v in measurement.clique],
        "deviation": deviation,
        "cells": cells,
        "off_by_at_most": round(min(2.0, (seen + noise) / whole), 4),
    }


def errors(meter: MarginalReleases, codes: Codes, total: float) -> dict[str, Any]:
    """How far the table is from the records, measured: the mean L1 distance of shares, for
    marginals of one, two and three columns.

    A record changes the distance of counts by at most 1 in every marginal, so their mean by at most
    1. Marginals that were not counted, being too large, are not in it.
    """
    domain, tables, found = meter.marginals.domain, meter.marginals.tables, {}
    for degree in range(1, DEGREES + 1):
        cliques = [clique for clique in tables if len(clique) == degree]
        if not cliques:
            continue
        scale = total / max(len(codes), 1)
        apart = [
            float(np.abs(tables[c] - table_of(codes, c, domain.shape(c)) * scale).sum())
            for c in cliques
        ]
        value, deviation = meter.number(sum(apart) / len(apart), Fraction(1, DEGREES - degree + 1))
        found[str(degree)] = {
            "marginals": len(cliques),
            "mean_l1": round(min(max(value / total, 0.0), 2.0), 5),
            "standard_error": deviation / total,
        }
    return found


def _told(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of the facts that the report repeats."""
    shown = [
        f"{' x '.join(m['columns'])} (noise {m['deviation']:.3g})"
        for m in facts["marginals"][:SHOWN]
    ]
    safe = "; ".join("".join(c if c.isprintable() else "?" for c in text) for text in shown)
    apart = [
        f"{held['mean_l1']:.4f} for {degree} (+- {held['standard_error']:.1g})"
        for degree, held in facts["error"].items()
    ]
    told = {"rows": facts["rows"], "measured": facts["measured"], "marginals": safe, "table": TABLE}
    return told | {"mean_l1_of_marginals_by_columns": "; ".join(apart)}
