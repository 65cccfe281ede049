"""Bugs that other libraries had, each as a test of dpfy by its public API: dpfy is right, or it
refuses clearly.

docs/security.md has the table. What went wrong there is told in each docstring, by the thread in
which it was reported.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "estimators"))

from replay import distances

import dpfy
from dpfy import accounting
from dpfy.accounting import composition
from dpfy.core import events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.estimators import KMeans, LinearRegression, LogisticRegression
from dpfy.local.choice import best
from dpfy.mechanisms.response import RandomizedResponseMechanism
from dpfy.queries.plan import QueryTerms
from dpfy.queries.run import answered
from dpfy.runs.run import Run
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
from dpfy.synthetic.run import synthesize_table
from dpfy.tables.columns import Category, Number
from dpfy_lab.mechanisms.aggregate import AggregateMean

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader")


class Line(nn.Module):
    """A model whose gradient at an example is the example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def trained(make: Any, model: nn.Module) -> torch.Tensor:
    """The weights after the steps of a training."""
    with make as training:
        for (x,) in training.batches():
            training.step(model(x))
    return model.weight.detach().clone()


def silent(records: int, batch: int, clip: float, sigma: float, **more: Any) -> Any:
    return dpfy.dpsgd(records=records, batch_size=batch, clip_norm=clip, **more).with_noise(
        sigma, delta=1e-5
    )


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("route", ["dpsgd", "from_opacus"])
def test_the_divisor_does_not_follow_the_number_of_records(
    route: str, number: int, tmp_path: Path
) -> None:
    """opacus #571, #819: noise and sum are divided by int(len(data) / len(loader)), so a record
    that joins rescales all the others.
    """
    rng = np.random.default_rng(number)
    public = int(rng.integers(20, 200))
    clip, rate = float(rng.uniform(0.2, 3)), float(rng.uniform(0.05, 2))
    moved = {}
    for held in (public - 1, public, public + 1):
        x = torch.tensor(
            np.random.default_rng(100 + number).normal(size=(public + 1, 3)), dtype=torch.float64
        )[:held]
        model = Line(3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        run = dpfy.Run(tmp_path / f"run{held}", seed=1)
        if route == "dpsgd":
            made = dpfy.PrivateTraining(
                model, optimizer, (x,), silent(public, public, clip, 0.0, steps=1), run
            )
        else:
            about = {
                "max_grad_norm": clip,
                "epochs": 1,
                "target_delta": 1e-5,
                "noise_multiplier": 0.0,
                "records": public,
            }
            loader = DataLoader(TensorDataset(x), batch_size=public)
            made = dpfy.from_opacus(
                module=model, optimizer=optimizer, data_loader=loader, run=run, **about
            )
            assert (made.plan.recipe.expected_batch, made.plan.recipe.steps) == (public, 1)
        moved[held] = trained(made, model)
    for more in (public, public + 1):
        last = torch.tensor(
            np.random.default_rng(100 + number).normal(size=(public + 1, 3)), dtype=torch.float64
        )[more - 1]
        due = -rate * last * min(1.0, clip / float(last.norm())) / public
        assert torch.allclose(moved[more] - moved[more - 1], due, rtol=1e-3, atol=1e-9)


SAMPLERS = {
    "weighted": lambda x: {"sampler": WeightedRandomSampler([1.0] * len(x), 16), "batch_size": 4},
    "with replacement": lambda x: {
        "sampler": RandomSampler(x, replacement=True, num_samples=16),
        "batch_size": 4,
    },
    "a part": lambda x: {"sampler": RandomSampler(x, num_samples=16), "batch_size": 4},
    "batches of its own": lambda x: {"batch_sampler": [[0, 1], [0, 2]]},
    "weighted batches": lambda x: {
        "batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * len(x), 16), 4, drop_last=False)
    },
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("route", ["PrivateTraining", "from_opacus"])
def test_a_sampler_that_the_plan_does_not_know_is_refused(
    route: str, sampler: str, tmp_path: Path
) -> None:
    """opacus #813: with a WeightedRandomSampler the sampling rate came from the number of draws,
    and the sampler was replaced silently.
    """
    x = torch.randn(40, 3)
    loader = DataLoader(TensorDataset(x), **SAMPLERS[sampler](x))  # type: ignore[arg-type]
    model = Line(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    about = {
        "max_grad_norm": 1.0,
        "epochs": 1,
        "target_delta": 1e-5,
        "noise_multiplier": 1.0,
        "records": 40,
    }
    plan = silent(40, 4, 1.0, 1.0, steps=2)
    routes = {
        "PrivateTraining": lambda: dpfy.PrivateTraining(
            model, optimizer, loader, plan, tmp_path / "run"
        ),
        "from_opacus": lambda: dpfy.from_opacus(
            module=model, optimizer=optimizer, data_loader=loader, run=tmp_path / "run", **about
        ),
    }
    with pytest.raises((Unsupported, InvalidInput)) as refused:
        routes[route]()
    assert "loader" in str(refused.value).lower()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_adapters_of_peft_take_the_private_step(engine: str, tmp_path: Path) -> None:
    """opacus #820: with newer peft the hooks missed the adapters, and 45 GPU hours wrote weights
    that were no training, without a word.
    """
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=30,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    adapted = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(shape), adapted).double()
    for (
        name,
        p,
    ) in model.named_parameters():  # adapters begin at zero: every one must move in one step
        if "lora_B" in name:
            p.data.normal_(std=0.05)
    tokens, clip = torch.randint(0, 30, (12, 6)), 0.05

    def losses(rows: torch.Tensor) -> torch.Tensor:
        scores = model(input_ids=rows).logits[:, :-1]
        return nn.functional.cross_entropy(
            scores.transpose(1, 2), rows[:, 1:], reduction="none"
        ).mean(1)

    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)
    due = {name: torch.zeros_like(p) for name, p in adapters.items()}
    for row in tokens:
        grads = torch.autograd.grad(losses(row[None]).sum(), list(adapters.values()))
        factor = min(1.0, clip / float(torch.stack([g.norm() for g in grads]).norm()))
        for name, grad in zip(adapters, grads, strict=True):
            due[name] += factor * grad / 12
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(adapters.values()), lr=1.0)
    with dpfy.PrivateTraining(
        model,
        optimizer,
        (tokens,),
        silent(12, 12, clip, 0.0, steps=1),
        tmp_path / "run",
        runtime=dpfy.Runtime(engine=engine),
    ) as training:
        for (rows,) in training.batches():
            training.step(losses(rows))
    for name, p in model.named_parameters():
        if name in due:
            assert due[name].norm() > 0, name
            assert torch.allclose(before[name] - p.detach(), due[name], rtol=1e-3, atol=1e-8), name
        else:
            assert torch.equal(before[name], p.detach()), name


def test_batches_are_drawn_as_they_are_billed(tmp_path: Path) -> None:
    """jax_privacy #84: the Keras examples took batches in order and billed Poisson sampling."""
    records, batch, steps = 400, 40, 100
    loader = DataLoader(
        TensorDataset(torch.arange(records, dtype=torch.float32)[:, None]),
        batch_size=batch,
        shuffle=True,
    )
    model = Line(1)
    plan = silent(records, batch, 1.0, 1.0, steps=steps)
    sizes, drawn = np.zeros(steps), np.zeros(records)
    with dpfy.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loader,
        plan,
        dpfy.Run(tmp_path / "r", seed=3),
    ) as t:
        for (x,) in t.batches():
            step = t.steps_done  # a batch may come in several pieces
            t.step(model(x))
            sizes[step] += len(x)
            np.add.at(drawn, x[:, 0].long().numpy(), 1)
    q = batch / records
    # sizes are binomial: their spread is that of a coin for each record (batches of one size have
    # none)
    spread = (steps - 1) * np.var(sizes, ddof=1) / (records * q * (1 - q))
    assert 1e-4 < stats.chi2(steps - 1).cdf(spread) < 1 - 1e-4
    # so is how often each record is drawn: passes over the data would draw each equally often
    spread = (records - 1) * np.var(drawn, ddof=1) / (steps * q * (1 - q))
    assert 1e-4 < stats.chi2(records - 1).cdf(spread) < 1 - 1e-4


def test_batches_of_ones_own_are_refused(tmp_path: Path) -> None:
    """jax_privacy #84: batches that nobody drew by the plan must not earn its amplification."""
    x, model = torch.randn(40, 3), Line(3)
    plan = silent(40, 10, 1.0, 1.0, steps=4)

    def loop() -> None:
        with dpfy.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), plan, tmp_path / "run"
        ) as training:
            for (rows,) in DataLoader(TensorDataset(x), batch_size=10):
                training.step(model(rows))

    with pytest.raises(InvalidInput, match="batches"):
        loop()
    assert not model.weight.detach().any()


@pytest.mark.parametrize("number", range(5))
def test_noise_is_calibrated_for_what_it_is_added_to(number: int, tmp_path: Path) -> None:
    """jax_privacy #383: an official example added noise that was made for the sum to the mean, so
    its scale did not match the bill.
    """
    rng = np.random.default_rng(number)
    width, records = 20_000, 30
    batch, clip, sigma, rate = (
        int(rng.integers(2, 30)),
        *(float(rng.uniform(0.2, 4)) for _ in range(3)),
    )
    model = Line(width)
    plan = silent(records, batch, clip, sigma, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    moved = trained(
        dpfy.PrivateTraining(
            model, optimizer, (torch.zeros(records, width),), plan, tmp_path / "r"
        ),
        model,
    )
    due = rate * sigma * clip / batch
    seen = float(moved.double().square().mean().sqrt()) / due
    assert abs(seen - 1) < 5 / math.sqrt(
        2 * width
    )  # five standard errors; 2/3 and 3/2 of it, and batch times it, are far outside
    assert abs(float(moved.double().mean())) / due < 5 / math.sqrt(width)
    assert plan.recipe.expected_batch == pytest.approx(batch)


# ---------------------------------------------------------------- mechanisms and statistics


@pytest.mark.parametrize("number", range(8))
def test_randomized_response_uses_every_answer_as_its_bill_says(number: int) -> None:
    """OpenDP #2708: randomized response was off by one in the number of answers."""
    rng = np.random.default_rng(number)
    buckets, epsilon, people = int(rng.integers(2, 12)), float(rng.uniform(0.2, 4)), 60_000
    response = RandomizedResponseMechanism.of(epsilon, buckets)
    stated = accounting.epsilon(
        response.event, 0.0, adjacency=Adjacency.REPLACE_ONE, accountant="basic"
    )
    assert stated <= epsilon * (1 + 1e-9)
    p = response.noise_parameter
    keep, other = 1 - p + p / buckets, p / buckets
    assert math.log(keep / other) <= stated * (1 + 1e-9)
    for truth in {0, buckets - 1, int(rng.integers(buckets))}:
        given = Bounded(np.full(people, truth), Bound.scalar(1))
        seen = response.release(
            given,
            mock_permit(response.event, 1, adjacency=Adjacency.REPLACE_ONE),
            Randomness.for_tests(number),
        ).value
        due = np.full(buckets, other * people)
        due[truth] = keep * people
        assert stats.chisquare(np.bincount(seen, minlength=buckets), due).pvalue > 1e-5
        off = np.full(
            buckets, (1 - keep) / buckets * people
        )  # the truth among the others, which is the mistake
        off[truth] += keep * people
        if abs(off - due).max() > 0.02 * people:
            assert stats.chisquare(np.bincount(seen, minlength=buckets), off).pvalue < 1e-5


@pytest.mark.parametrize("number", range(6))
def test_the_best_local_protocol_costs_what_it_says(number: int) -> None:
    """OpenDP #2708, for whole devices: a report is as likely under two values as exp(epsilon) says,
    the first and the last among them.
    """
    rng = np.random.default_rng(number)
    buckets, epsilon, people = int(rng.integers(2, 8)), float(rng.uniform(0.5, 3)), 40_000
    protocol = best(epsilon, buckets)
    assert accounting.epsilon(
        protocol.event, 0.0, adjacency=Adjacency.REPLACE_ONE, accountant="basic"
    ) <= epsilon * (1 + 1e-9)
    shares = []
    for truth in (0, buckets - 1):
        seen = np.asarray(
            protocol.reports(
                np.full(people, truth), randomness=Randomness.for_tests(number + truth)
            )
        )
        seen = seen.reshape(people, -1)
        kinds, counts = np.unique(seen, axis=0, return_counts=True)
        shares.append(
            {tuple(kind): count for kind, count in zip(kinds.tolist(), counts, strict=True)}
        )
    for kind in set(shares[0]) & set(shares[1]):
        one, other = shares[0][kind], shares[1][kind]
        if min(one, other) > 200:  # five standard errors of a logarithm of counts
            assert abs(math.log(one / other)) <= epsilon + 5 * math.sqrt(1 / one + 1 / other)


COLUMNS = {"t": Number("t", 2000, 2030), "sex": Category("sex", ("f", "m"))}
QUERY = "mean(t), median(t), mode(sex), histogram(t, 2010, 2020), histogram(sex)"
TERMS = QueryTerms(epsilon=5.0)


class Hostile:
    """A cell of a type that nobody has seen."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __str__(self) -> str:
        raise RuntimeError("no text")


CELLS: list[Any] = [
    None, "", "x", "2021-99-99", float("nan"), math.inf, -math.inf, 10**400, -(10**400), 9 * 10**18, b"\xff", "\ud800", "1_000", "0x10",  # noqa: E501
    [], {}, (1, 2), Hostile(), np.datetime64("NaT"), np.datetime64(9 * 10**18, "us"), 1j, True, "9" * 5000,
]  # fmt: skip


def test_no_cell_stops_a_query(tmp_path: Path) -> None:
    """OpenDP #2942: one garbled timestamp ended the query, which tells that this record is
    there.
    """
    years = [2001, 2005, 2025]
    plain = answered(
        {"t": years, "sex": ["f", "m", "f"]},
        QUERY,
        schema=COLUMNS,
        terms=TERMS,
        run=tmp_path / "plain",
    )
    for number in range(0, len(CELLS), 6):
        some = [[cell] for cell in CELLS[number : number + 6]]
        cells, sexes = (
            np.array([*years, *[None] * len(some)], dtype=object),
            np.array(["f", "m", "f", *[None] * len(some)], dtype=object),
        )
        for k, (cell,) in enumerate(some, start=3):
            cells[k] = sexes[k] = cell
        found = answered(
            {"t": cells, "sex": sexes},
            QUERY,
            schema=COLUMNS,
            terms=TERMS,
            run=tmp_path / f"run{number}",
        )
        assert [a.place for a in found.answers] == [a.place for a in plain.answers]


def arrow_columns() -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    broken = (
        pa.array([b"2001", b"\xff\xfe"], pa.binary()).view(pa.string())
        if hasattr(pa.Array, "view")
        else None
    )
    kinds = {
        "timestamp": pa.array([0, 9 * 10**18], pa.timestamp("us")),
        "timestamp with zone": pa.array([0, 9 * 10**18], pa.timestamp("us", tz="UTC")),
        "timestamp in seconds": pa.array([0, -9 * 10**18], pa.timestamp("s")),
        "date32": pa.array([0, 2**31 - 1], pa.date32()),
        "date64": pa.array([0, 86_400_000 * 2**35], pa.date64()),
        "duration": pa.array([0, 2**62], pa.duration("s")),
        "binary": pa.array([b"2001", b"\xff\xfe"], pa.binary()),
        "list": pa.array([[2001], None], pa.list_(pa.int64())),
        "struct": pa.array([{"a": 1}, None]),
        "null": pa.array([None, None], pa.null()),
    }
    return kinds | ({"text that is none": broken} if broken is not None else {})


@pytest.mark.parametrize("where", ["arrow", "parquet"])
def test_no_cell_of_an_arrow_table_stops_a_query_or_a_synthesis(where: str, tmp_path: Path) -> None:
    """OpenDP #2942 again: Arrow holds dates that Python does not have. dpfy had this bug: five of
    these types ended in an error.
    """
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "s.toml").write_text(
        '[columns.t]\nkind = "number"\nrange = [2000, 2030]\n[columns.sex]\nkind = '
        '"category"\ncategories = ["f", "m"]\n'
    )
    for number, column in enumerate(arrow_columns().values()):
        table = pa.table({"t": column, "sex": ["f", "m"]})
        data: Any = table
        if where == "parquet":
            data = tmp_path / f"{number}.parquet"
            try:
                pq.write_table(table, data)
            except pa.ArrowException:  # what no file can hold
                continue
        answered(data, QUERY, schema=COLUMNS, terms=TERMS, run=tmp_path / f"query{number}")
        if number == 0:
            terms = SynthesisTerms(epsilon=1.0, delta=1e-6)
            synthesize_table(
                data, schema=tmp_path / "s.toml", terms=terms, run=tmp_path / f"made{number}"
            )
    from dpfy.tables.cells import listed

    for kind, column in arrow_columns().items():  # the cells beside it are what they are without it
        assert listed(column)[0] == column[:1].to_pylist()[0], kind


def test_a_fit_neither_refuses_nor_prints_a_cell_without_a_value(tmp_path: Path) -> None:
    """OpenDP #2942: a cell that is no number is missing to an estimator; Arrow's own error printed
    its bytes. Where the schema is strict, the cell is refused without its text.
    """
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "s.toml").write_text(
        '[columns.t]\nkind = "number"\nrange = [2000, 2030]\n[columns.sex]\nkind = '
        '"category"\ncategories = ["f", "m"]\n'
    )
    strict = tmp_path / "strict.toml"
    strict.write_text("strict = true\n" + (tmp_path / "s.toml").read_text())
    for kind, column in arrow_columns().items():
        table = pa.table({"t": column, "sex": ["f", "m"]})
        LogisticRegression(schema=tmp_path / "s.toml", classes=[0, 1]).fit(table, [0, 1])
        with pytest.raises(InvalidInput) as refused:
            LogisticRegression(schema=strict, classes=[0, 1]).fit(table, [0, 1])
        assert str(refused.value).startswith("column t, row "), kind
        assert "\ufffd" not in str(refused.value)


@pytest.mark.parametrize("number", range(6))
def test_merged_groups_do_not_multiply_a_person(number: int, tmp_path: Path) -> None:
    """OpenDP #2949: groups were merged after a person's groups had been limited, and the old limit
    was still believed.
    """
    pa = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(number)
    words, most, groups = 60, int(rng.integers(2, 9)), int(rng.integers(2, 5))
    each = int(rng.integers(1, most + 1))
    others = [(int(k), str(rng.choice(["f", "m"]))) for k in rng.integers(1, 30, 200)]
    mine = [(0, f"unlisted {k}") for k in range(words)]  # many groups that become one: "(other)"
    columns = {"who": Number("who", 0, 1000), "sex": Category("sex", ("f", "m"))}
    terms = QueryTerms(
        epsilon=900.0, user="who", most_records=most, most_groups=groups, most_each=each
    )
    texts, makers = ("histogram(sex)", "count() by sex", "table(sex)"), (dict, pa.table)
    for k, (text, table) in enumerate(itertools.product(texts, makers)):
        counts = []
        for rows in (others, others + mine):
            data = table({"who": [who for who, _ in rows], "sex": [sex for _, sex in rows]})
            # with one secret, the same rows of everyone else are used
            run = Run(tmp_path / f"run{k} {len(rows)}", seed=number)
            made = answered(data, text, schema=columns, terms=terms, run=run)
            counts.append(
                {json.dumps(a.place, sort_keys=True): float(a.value) for a in made.answers}
            )
        moved = [abs(counts[1][place] - counts[0][place]) for place in counts[0]]
        assert max(moved) <= min(most, each) + 1.5, (
            text,
            moved,
        )  # the noise at this epsilon is below one
        assert sum(m > 1.5 for m in moved) <= 1, (
            text,
            moved,
        )  # all of one person's groups are one now


@pytest.mark.parametrize("number", range(6))
def test_one_record_touches_one_block_whatever_the_count(number: int) -> None:
    """OpenDP #2950: a table cut to an even length, so that a record that joined pushed another one
    out, was billed as moving one.
    """
    rng = np.random.default_rng(number)
    rows = rng.normal(size=int(rng.integers(30, 60)))
    mechanism = AggregateMean(1.0, blocks=8, lower=-100.0, upper=100.0)
    seen: list[list[tuple[float, ...]]] = []
    for table in (rows, np.append(rows, 50.0)):  # even and odd counts, in one order or the other
        blocks: list[tuple[float, ...]] = []

        def spy(block: Any, kept: list[tuple[float, ...]] = blocks) -> float:
            kept.append(tuple(block))
            return float(np.mean(block))

        mechanism.release(spy, table, mock_permit(mechanism.event, 1), Randomness.for_tests(number))
        seen.append(blocks)
    lost = [block for block in seen[0] if block not in seen[1]]
    new = [block for block in seen[1] if block not in seen[0]]
    assert len(lost) <= 1
    assert len(new) == 1
    assert set(itertools.chain(*lost)) <= set(new[0])


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("even", [True, False])
def test_one_record_moves_a_regression_by_its_bound_whatever_the_count(
    even: bool, intercept: bool
) -> None:
    """OpenDP #2950, for the regression that it was in."""
    rng = np.random.default_rng(int(even))
    x = rng.uniform(-1, 1, (40 + even, 1))
    y = x[:, 0] + rng.normal(size=len(x)) / 10
    made = LinearRegression(
        bounds=(-1, 1), target_bounds=(-2, 2), epsilon=1.0, fit_intercept=intercept, random_state=0
    )
    assert max(d for _, d in distances(made, (x, y), (x[:-1], y[:-1]))) <= 1 + 1e-12


RANGES = [(0.0, 100.0), (-1.0, 50.0), (-200.0, 1.0), (3.0, 4.0), (-7.0, -2.0)]


@pytest.mark.parametrize("low_high", RANGES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "linear without intercept", "logistic", "k-means"])
def test_sensitivities_take_both_ends_of_every_range(
    kind: str, low_high: tuple[float, float]
) -> None:
    """diffprivlib #104: five wrong sensitivities; the regression took the lower end of a range
    twice, so that [0, 100] had none.
    """
    low, high = low_high
    rng = np.random.default_rng(5)
    x = rng.uniform(low, high, (60, 2))
    y = rng.uniform(low, high, 60) if "linear" in kind else rng.integers(0, 2, 60)
    about = {"bounds": (low, high), "epsilon": 1.0, "random_state": 0}
    made: Any
    if "linear" in kind:
        made = LinearRegression(target_bounds=(low, high), fit_intercept=kind == "linear", **about)
    elif kind == "logistic":
        made = LogisticRegression(classes=[0, 1], **about)
    else:
        made, y = KMeans(n_clusters=3, **about), None
    worst = 0.0
    for corner in ([low, low], [high, high], [low, high], [1e9, -1e9]):
        for label in (low, high) if "linear" in kind else (0, 1):
            more = np.vstack([x, corner])
            labels = None if y is None else np.append(y, label)
            moved = distances(made, (more, labels), (x, y))
            assert max(d for _, d in moved) <= 1 + 1e-12, (corner, label, moved)
            worst = max(worst, *(d for _, d in moved))
    assert worst > 0.05  # and the bound is no guess far above


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kind", ["linear", "logistic", "k-means"])
def test_all_releases_of_an_estimator_are_in_its_bill(
    kind: str, intercept: bool, tmp_path: Path
) -> None:
    """diffprivlib #104: X and y were centred from one share of the budget, which was spent
    twice.
    """
    rng = np.random.default_rng(6)
    x, y = rng.uniform(0, 1, (200, 3)), rng.uniform(0, 1, 200)
    about = {"bounds": (0, 1), "epsilon": 0.7, "random_state": 0, "run": tmp_path / "run"}
    made: Any
    if kind == "linear":
        made = LinearRegression(target_bounds=(0, 1), fit_intercept=intercept, **about).fit(x, y)
    elif kind == "logistic":
        made = LogisticRegression(classes=[0, 1], fit_intercept=intercept, **about).fit(x, y > 0.5)
    else:
        made = KMeans(n_clusters=3, **about).fit(x)
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantee"]["epsilon"]
    assert 0.6 < stated <= 0.7
    assert made is not None


@pytest.mark.parametrize("number", range(25))
def test_advanced_composition_is_its_theorem_and_bounds_the_truth(number: int) -> None:
    """smartnoise #621: the odometer's formula had lost a logarithm."""
    rng = np.random.default_rng(number)
    each, count, slack = (
        float(rng.uniform(0.01, 1.0)),
        int(rng.integers(1, 200)),
        float(10 ** rng.uniform(-9, -2)),
    )
    found, delta = composition.advanced(each, 0.0, count, slack)
    assert found == pytest.approx(
        each * math.sqrt(2 * count * math.log(1 / slack)) + count * each * math.expm1(each),
        rel=1e-12,
    )
    assert delta == pytest.approx(slack)

    def needed(epsilon: float) -> float:
        """The delta that randomized response, repeated, needs at `epsilon`: the worst case of pure
        epsilons (Kairouz et al. 2015).
        """
        chances = stats.binom(count, 1 / (1 + math.exp(-each))).logpmf(range(count + 1))
        losses = each * (2 * np.arange(count + 1) - count)
        over = losses > epsilon
        return float((np.exp(chances[over]) * -np.expm1(epsilon - losses[over])).sum())

    many = events.Repeated(events.EpsilonDelta(each), count)
    for accountant in ("tight", "advanced", "basic"):
        stated = accounting.epsilon(
            many, slack, adjacency=Adjacency.ADD_OR_REMOVE_ONE, accountant=accountant
        )
        assert needed(stated) <= slack * (1 + 1e-6), accountant
        assert stated <= count * each * (1 + 1e-6), accountant
    for stated in (found, composition.kairouz(each, 0.0, count, slack)):
        assert needed(stated) <= slack * (1 + 1e-6)


@pytest.mark.parametrize("number", range(6))
def test_a_covariance_is_that_of_clipped_values(number: int, tmp_path: Path) -> None:
    """smartnoise #622: the values were clipped, and the covariance was taken of those before
    clipping.
    """
    rng = np.random.default_rng(number)
    low, high = sorted(rng.uniform(-50, 50, 2))
    columns = {"a": Number("a", low, high), "b": Number("b", low, high)}
    a, b = rng.uniform(low, high, 500), rng.uniform(low, high, 500)
    values = []
    for k, (first, second) in enumerate([(high, low), (1e12, -1e12), (math.inf, -math.inf)]):
        data = {"a": np.append(a, first), "b": np.append(b, second)}
        made = answered(
            data,
            "covariance(a, b), variance(a)",
            schema=columns,
            terms=QueryTerms(epsilon=900.0),
            run=tmp_path / f"{k}",
        )
        values.append([float(answer.value) for answer in made.answers])
    matrix = np.cov(np.append(a, high), np.append(b, low), ddof=0)
    truth = [matrix[0, 0], matrix[0, 1], matrix[1, 1], matrix[0, 0]]
    for found in values:
        assert found == pytest.approx(truth, abs=0.02 * (high - low) ** 2)


# ---------------------------------------------------------------- synthetic data


@pytest.mark.parametrize("method", ["independent", "mst", "aim"])
def test_nothing_public_about_synthetic_data_is_read_from_the_records(
    method: str, tmp_path: Path
) -> None:
    """dpsynth #34: exact smallest and largest values went into the description of the columns, and
    into the rows that were made.
    """
    (tmp_path / "s.toml").write_text(
        '[columns.income]\nkind = "number"\nrange = [0, 1000]\n[columns.sex]\nkind = '
        '"category"\ncategories = ["f", "m"]\n'
    )
    rng = np.random.default_rng(1)
    sexes = rng.choice(["f", "m"], 300)
    claims, inside = [], []
    for k, (low, high) in enumerate([(412.25, 431.75), (0.0, 1000.0)]):
        data = {"income": np.append(rng.uniform(low, high, 298), [low, high]), "sex": sexes}
        options = SynthesisOptions(method, rows=400)
        made = synthesize_table(
            data,
            schema=tmp_path / "s.toml",
            terms=SynthesisTerms(epsilon=1.0, delta=1e-6),
            run=tmp_path / f"{k}",
            options=options,
        )
        card = json.loads((made.run / "privacy.json").read_text())
        claims.append(card["sections"][0]["claim"])
        for file in made.run.rglob("*"):
            if file.is_file() and k == 0:
                assert b"412.25" not in file.read_bytes() or file.name == made.table.name
                assert b"431.75" not in file.read_bytes() or file.name == made.table.name
        with made.table.open(newline="") as file:
            incomes = [
                float(row["income"]) for row in csv.DictReader(file) if row["income"]
            ]  # a cell may be missing
        inside.append((min(incomes), max(incomes)))
        assert 0 <= min(incomes) <= max(incomes) <= 1000
    assert claims[0] == claims[1]
    assert (
        inside[0][0] < 412.25 or inside[0][1] > 431.75
    )  # rows spread over cells of the public range


def test_synthetic_data_without_a_public_range_is_refused(tmp_path: Path) -> None:
    """dpsynth #34: a range that is not given is not looked up."""
    (tmp_path / "s.toml").write_text('[columns.income]\nkind = "number"\n')
    with pytest.raises(InvalidInput, match="range"):
        synthesize_table(
            {"income": [1.0, 2.0]},
            schema=tmp_path / "s.toml",
            terms=SynthesisTerms(epsilon=1.0, delta=1e-6),
            run=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_voters_share_no_scale_that_is_read_from_the_records(tmp_path: Path) -> None:
    """synthcity #278: PATE-GAN scaled by the smallest and the largest value of the private
    records.
    """
    from dpfy.prediction import teach

    rng = np.random.default_rng(2)
    x, y = rng.uniform(0, 1, (300, 4)), rng.integers(0, 2, 300)
    more, labels = np.vstack([x, [1e6, -1e6, 1e6, 0.0]]), np.append(y, 1)
    asked = rng.uniform(0, 1, (200, 4))
    one = teach(x, y, voters=20, classes=2, randomness=Randomness.for_tests(3))
    other = teach(more, labels, voters=20, classes=2, randomness=Randomness.for_tests(3))
    # an extreme record would move every voter if it moved a common scale: it moves the one that
    # holds it
    assert np.abs(one.votes(asked) - other.votes(asked)).sum(axis=1).max() <= 2
