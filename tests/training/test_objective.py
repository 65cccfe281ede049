"""How batches of any structure reach model and loss, losses by name, and what `fit` refuses in one
line before it spends anything.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.training import config, job
from dpfy.training.losses import LOSSES
from dpfy.training.objective import Objective

sys.path.insert(0, str(Path(__file__).parent))
import small

X, Y = small.data()
WEIGHT = torch.rand(small.RECORDS, generator=torch.Generator().manual_seed(2))


class Two(nn.Module):
    """A model of two inputs, by place or by name."""

    def __init__(self, outputs: int = small.CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, outputs), nn.Linear(6, outputs)

    def forward(self, a, b):
        return self.left(a) + self.right(b)


class Answer(dict):
    """Looks like an output of Hugging Face's models."""

    logits = property(lambda self: self["logits"])


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Two()

    def forward(self, a, b):
        return Answer(logits=self.inner(a, b))


def fit(net, train, path, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"plan": small.plan(3), "run": dpfy.Run(path, seed=5)} | options
    return dpfy.fit(net, train, **({"optimizer": optimizer} | given))


A, B = X[:, :6], X[:, 6:]


class Lazily(torch.utils.data.Dataset):
    """Items that are dicts, with labels of some type."""

    def __init__(self, kind=int):
        self.kind = kind

    def __len__(self):
        return small.RECORDS

    def __getitem__(self, index):
        return {"a": A[index], "b": B[index], "labels": torch.tensor(self.kind(Y[index]))}


SHAPES = {
    "three fields": (A, B, Y),
    "int32 labels": (A, B, Y.int()),
    "labels of one column": (A, B, Y[:, None]),
    "a dict": {"a": A, "b": B, "labels": Y},
    "a dict beside the target": ({"a": A, "b": B}, Y),
    "a tuple beside the target": ((A, B), Y),
    "what a tokenizer gives": UserDict({"a": A, "b": B, "labels": Y}),
    "arrays": (A.numpy(), B.numpy(), Y.numpy().astype(np.int16)),
}


def moved(train):
    """Public data like `train`: other features, the same labels."""
    if isinstance(train, Mapping):
        return type(train)({key: moved(value) for key, value in train.items()})
    if isinstance(train, tuple | list):
        return type(train)(moved(value) for value in train)
    real = train.dtype.kind == "f" if isinstance(train, np.ndarray) else train.is_floating_point()
    return train + 1 if real else train


@pytest.mark.parametrize("wrap", [Two, Wrapped])
def test_batches_of_any_structure_train_and_are_measured_alike(tmp_path, wrap):
    """The same records in other structures give the same weights, the same figures and a run that
    verifies.
    """
    found = []
    for number, train in enumerate(SHAPES.values()):
        net = wrap()
        result = fit(net, train, tmp_path / f"{number}", evaluation=dpfy.PublicTest(moved(train)))
        found.append((result.utility, [p.detach().clone() for p in net.parameters()]))
        assert set(result.utility) == {"test_loss", "test_accuracy"}
        assert sum(map(sum, small.card_of(result.run)["confusion"])) == small.RECORDS
    for utility, weights in found[1:]:
        assert utility == found[0][0]
        assert all(map(torch.equal, weights, found[0][1]))
    assert all(f.holds for f in dpfy.verify(tmp_path / "0"))


def test_a_layer_may_be_called_by_the_name_of_its_input(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = (
                nn.Linear(small.FEATURES, 4),
                nn.LayerNorm(4),
                nn.Linear(4, small.CLASSES),
            )

        def forward(self, input):
            return self.head(input=self.norm(input=self.body(input=input)))

    for name, net in (("layer", nn.Linear(small.FEATURES, small.CLASSES)), ("model", Named())):
        fit(
            net,
            {"input": X, "labels": Y},
            tmp_path / name,
            evaluation=dpfy.PublicTest({"input": X + 1, "labels": Y}),
        )


def test_the_key_of_the_labels_may_be_named(tmp_path):
    fit(Two(), {"a": A, "b": B, "class": Y}, tmp_path / "run", labels="class")
    with pytest.raises(
        InvalidInput, match=r'labels: got .0 of the fields a, b, class.; say by labels="..."'
    ):
        fit(Two(), {"a": A, "b": B, "class": Y}, tmp_path / "no")
    with pytest.raises(InvalidInput, match="2 of the fields a, b, labels, y"):
        fit(Two(), {"a": A, "b": B, "labels": Y, "y": Y}, tmp_path / "no")
    with pytest.raises(
        InvalidInput, match="labels: got 'kind'; must be a key of the batch: a, b, class"
    ):
        fit(Two(), {"a": A, "b": B, "class": Y}, tmp_path / "no", labels="kind")
    with pytest.raises(InvalidInput, match="labels: got 'y'; is a key, but a batch is a tuple"):
        fit(Two(), (A, B, Y), tmp_path / "no", labels="y")
    assert not (tmp_path / "no").exists()


def test_an_objective_of_model_and_batch_does_everything_else(tmp_path):
    """A weight for each row; and one field alone, without a target."""

    def weighed(model, batch):
        a, b, y, weight = batch
        return weight * functional.cross_entropy(model(a, b), y, reduction="none")

    result = fit(
        Two(),
        (A, B, Y, WEIGHT),
        tmp_path / "run",
        objective=weighed,
        evaluation=dpfy.PublicTest((A + 1, B + 1, Y, WEIGHT)),
    )
    assert set(result.utility) == {"test_loss"}
    coder = nn.Sequential(nn.Linear(small.FEATURES, 3), nn.Linear(3, small.FEATURES))
    fit(
        coder,
        X,
        tmp_path / "coder",
        objective=lambda model, batch: (model(batch[0]) - batch[0]).square().mean(1),
    )
    with pytest.raises(InvalidInput, match=r"one field a row.; holds no targets.*objective="):
        fit(coder, X, tmp_path / "no")
    with pytest.raises(Unsupported, match="anything but classes"):
        fit(
            Two(),
            (A, B, Y, WEIGHT),
            tmp_path / "no",
            objective=weighed,
            evaluation=dpfy.PrivateTest((A + 1, B + 1, Y, WEIGHT)),
        )
    with pytest.raises(InvalidInput, match="needs no loss or labels"):
        fit(Two(), (A, B, Y, WEIGHT), tmp_path / "no", objective=weighed, loss="mse")
    assert not (tmp_path / "no").exists()


def test_a_resumed_run_refuses_another_loss_of_the_callers(tmp_path):
    class Stop(Exception):
        pass

    def run(factor, stop):
        def loss(outputs, targets):
            return functional.cross_entropy(outputs, targets, reduction="none") * factor

        net, calls = Two(), []

        def enter(module, args):
            calls.append(1)
            if stop and len(calls) > 2:
                raise Stop

        net.left.register_forward_pre_hook(enter)
        return fit(
            net,
            (A, B, Y),
            tmp_path / "run",
            loss=loss,
            run=dpfy.Run(tmp_path / "run", resume=True, seed=5, checkpoint_every=0.0),
        )

    with pytest.raises(Stop):
        run(1.0, True)
    with pytest.raises(InvalidInput, match="resume losses: got 'other losses'"):
        run(0.5, False)


def naive(name, outputs, targets):
    if name in ("mse", "squared_error"):
        return (outputs - targets).square().flatten(1).mean(1)
    if name == "l1":
        return (outputs - targets).abs().flatten(1).mean(1)
    if name == "huber":
        gap = (outputs - targets).abs()
        return torch.where(gap < 1, gap**2 / 2, gap - 0.5).flatten(1).mean(1)
    return (outputs.exp().add(1).log() - targets * outputs).flatten(1).mean(1)


@pytest.mark.parametrize("name", ["mse", "squared_error", "l1", "huber", "bce", "multi_label"])
@pytest.mark.parametrize("width", [1, 4])
def test_losses_by_name_are_what_their_names_say(name, width):
    generator = torch.Generator().manual_seed(3)
    outputs = 2 * torch.randn(7, width, generator=generator, dtype=torch.float64)
    targets = (torch.rand(7, width, generator=generator) < 0.5).double()
    found = LOSSES[name].loss(outputs, targets)
    assert torch.allclose(found, naive(name, outputs, targets), atol=1e-12)
    assert torch.equal(
        found, LOSSES[name].loss(outputs, targets.int())
    )  # whole numbers become numbers
    if width == 1:
        assert torch.equal(found, LOSSES[name].loss(outputs.flatten(), targets))
    with pytest.raises(InvalidInput, match="one target for each number"):
        LOSSES[name].loss(outputs, torch.zeros(7, 3))


def test_tokens_leave_out_what_is_not_labelled_and_next_token_looks_one_ahead():
    outputs = torch.randn(2, 4, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100, -100], [-100, -100, -100, -100]])
    log = outputs.log_softmax(-1)
    found = LOSSES["tokens"].loss(outputs, targets)
    assert torch.allclose(
        found,
        torch.stack([-(log[0, 0, 1] + log[0, 1, 2]) / 2, torch.zeros((), dtype=torch.float64)]),
    )
    ahead = LOSSES["next_token"].loss(outputs, targets)
    assert torch.allclose(ahead[0], -log[0, 0, 2])
    assert LOSSES["tokens"].right(outputs, targets)[1] == 0
    assert LOSSES["tokens"].right(outputs, torch.zeros(2, 1, dtype=torch.int64)) is None
    picture = torch.randn(2, 3, 4, 4)
    classes = torch.randint(0, 3, (2, 4, 4))
    due = functional.cross_entropy(picture, classes, reduction="none").flatten(1).mean(1)
    assert torch.allclose(LOSSES["cross_entropy"].loss(picture, classes), due)


def test_a_target_of_probabilities_is_one():
    outputs, targets = torch.randn(4, 3), torch.softmax(torch.randn(4, 3), 1)
    assert torch.allclose(
        LOSSES["cross_entropy"].loss(outputs, targets), -(targets * outputs.log_softmax(1)).sum(1)
    )


YES = (X.sum(1) > 0).float()
MANY = (X[:, :4] > 0).float()


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"), [("bce", 1, YES), ("multi_label", 4, MANY)]
)
def test_yes_and_no_are_measured_and_billed(tmp_path, loss, outputs, targets):
    for use, evaluation in (
        ("public", dpfy.PublicTest((X + 1, targets))),
        ("billed", dpfy.PrivateTest((X + 1, targets), noise_multiplier=1.0)),
    ):
        net = nn.Linear(small.FEATURES, outputs)
        result = fit(
            net,
            (X, targets),
            tmp_path / use,
            loss=loss,
            evaluation=evaluation,
        )
        card = small.card_of(result.run)
        assert 0 <= result.utility["test_accuracy"] <= 1
        assert (len(card["confusion"]) == 2) == (loss == "bce")
        assert all(f.holds for f in dpfy.verify(tmp_path / use))
        if use == "public":
            exact = ((net(X + 1).detach() > 0) == (targets.view(len(X), -1) > 0.5)).double().mean()
            assert result.utility["test_accuracy"] == pytest.approx(float(exact), abs=1e-12)


def test_a_record_of_many_answers_moves_the_billed_counts_by_at_most_one():
    """Shares of right and wrong answers, whatever the model and the labels are."""
    aim = Objective("tokens")
    for outputs, targets in (
        (torch.randn(3, 5, 4), torch.randint(-1, 4, (3, 5))),
        (torch.randn(3, 5, 4), torch.full((3, 5), -100)),
    ):
        shares = aim.named.right(outputs, targets)
        assert bool(((shares >= 0) & (shares <= 1)).all())


PAIR = Two()
OF_PAIR = torch.optim.SGD(PAIR.parameters(), lr=0.1)
LAST = nn.Linear(small.FEATURES, small.CLASSES)
SGD = torch.optim.SGD(LAST.parameters(), lr=0.1)
REFUSED = [
    (
        {"plan": dpfy.dpsgd(small.RECORDS, 20, steps=3)},
        r"plan: got 'a recipe'; fix its noise first: recipe.calibrate",
    ),
    ({"plan": 3.0}, "plan: got 'float'; must be a plan"),
    (
        {"optimizer": "adam"},
        r"optimizer: got 'adam'; must be an optimizer of the model: torch.optim.Adam\(",
    ),
    ({"optimizer": torch.optim.SGD}, "optimizer: got 'type'; must be an optimizer"),
    (
        {"optimizer": torch.optim.LBFGS(LAST.parameters())},
        "LBFGS, which evaluates the loss again inside a step",
    ),
    ({"model": "resnet18"}, "model: got 'str'; must be a torch.nn.Module"),
    (
        {"train": (X, Y.float())},
        r'train labels: got .float32.; classes are whole numbers.*labels.long\(\).*loss="mse"',
    ),
    (
        {"train": (X.numpy(), Y.double().numpy())},
        "train labels: got 'float64'; classes are whole numbers",
    ),
    (
        {"evaluation": dpfy.WithheldTest((X, Y.float()))},
        "evaluation labels: got 'float32'; classes are whole numbers",
    ),
    ({"loss": "mape"}, "loss: got 'mape'; must be one of cross_entropy, mse"),
    ({"loss": 3}, "loss: got 'int'; must be the name of a loss or a function"),
    (
        {"loss": "mse"},
        r"labels: got .int64 of shape \[\d+\] for outputs of shape \[\d+, 3\].*classes need "
        r"cross_entropy",
    ),
    ({"train": (X,)}, "one field a row"),
    ({"train": (X, {"y": Y})}, "labels: got 'dict'; a loss by name needs one tensor of targets"),
    ({"train": {1: X, "y": Y}}, "train: got 'the key 1'; fields go to the model by name"),
    ({"train": (X, Y + 1)}, "labels: got 'a class outside'; must be from 0 to 2"),
    (
        {
            "model": PAIR,
            "optimizer": torch.optim.SGD(PAIR.parameters(), lr=0.1),
            "train": Lazily(float),
        },
        r"labels: got 'float32 of shape .*classes are whole numbers",
    ),
    ({"evaluation": dpfy.PublicTest((X[:, :3], Y))}, "shapes cannot be multiplied"),
    ({"evaluation": dpfy.PublicTest(X)}, "one field a row"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_bad_input_is_one_line_and_nothing_is_spent(tmp_path, change, words):
    given = {"model": LAST, "train": (X, Y), "optimizer": SGD, "plan": small.plan(3)} | change
    run = dpfy.Run(tmp_path / "run", ledger=tmp_path / "all.jsonl")
    with pytest.raises((DpfyError, RuntimeError), match=words) as problem:
        dpfy.fit(given.pop("model"), given.pop("train"), run=run, **given)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "run").exists()
    assert (
        not (tmp_path / "all.jsonl").exists() or Ledger.read(tmp_path / "all.jsonl").permits() == []
    )


def test_a_hugging_face_model_is_trained_and_measured(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    net = transformers.BertForSequenceClassification(config)
    ids, others = torch.randint(0, 30, (2, small.RECORDS, 8))
    train = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    result = fit(
        net, train, tmp_path / "run", evaluation=dpfy.PublicTest(train | {"input_ids": others})
    )
    assert set(result.utility) == {"test_loss", "test_accuracy"}
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_what_is_read_lazily_trains_and_is_measured_as_in_memory(tmp_path):
    found = []
    for name, data in (
        ("memory", SHAPES["a dict"]),
        ("lazy", Lazily()),
        ("loader", torch.utils.data.DataLoader(Lazily())),
        ("rows", [Lazily()[n] for n in range(small.RECORDS)]),
    ):
        net = Two()
        result = fit(
            net, data, tmp_path / name, evaluation=dpfy.PrivateTest(data, noise_multiplier=1.0)
        )
        found.append((result.utility, [p.detach() for p in net.parameters()]))
    for utility, weights in found[1:]:
        assert utility == found[0][0]
        assert all(map(torch.equal, weights, found[0][1]))
    views = dpfy.lazy(Lazily(), views=2)
    net = Two()
    fit(net, views, tmp_path / "views")
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), found[0][1], strict=True)
    )  # both views are the record
    with pytest.raises(InvalidInput, match="evaluation: got 'several records or views a row'"):
        fit(Two(), views, tmp_path / "no", evaluation=dpfy.WithheldTest(views))


class OfRows(nn.Linear):
    """A model of [rows, features], and of nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, _ = x.shape
        return super().forward(x.reshape(rows, -1))


def test_a_user_of_one_record_is_a_row_of_the_model(tmp_path):
    users = dpfy.by_user((X, Y), torch.arange(small.RECORDS), most=1)
    plan = dpfy.dpsgd(small.RECORDS, 20, steps=2, unit=users.unit).with_noise(2.0, delta=1e-3)
    net = OfRows(small.FEATURES, small.CLASSES)
    fit(net, users, tmp_path / "run", plan=plan)
    with pytest.raises(InvalidInput, match="must be records one by one"):
        fit(net, users, tmp_path / "no", plan=plan, evaluation=dpfy.WithheldTest(users))


def test_squared_error_of_a_job_is_that_to_its_classes(tmp_path):
    """Whose labels are numbers of classes: they were taken for numbers to be predicted, by every
    output.
    """
    flags = {
        "data.kind": "digits",
        "model.name": "linear",
        "training.loss": "squared_error",
        "training.steps": 20,
        "privacy.epsilon": 50.0,
    }
    made = job.run(config.make({}, flags), tmp_path / "run", seed=3)
    assert small.card_of(made.run)["utility"]["test_accuracy"] > 0.7
