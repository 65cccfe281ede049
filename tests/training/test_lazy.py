"""Lazy data: the bits of a run in memory, whatever reads the records; the same after any death;
nothing read before it is reserved.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.data.given import as_source, rows_of
from dpfy.data.lazy import LazyRecords
from dpfy.gradients import per_view

sys.path.insert(0, str(Path(__file__).parent))
import small
from lazily import Rows, X, Y, equal, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:DataLoader:UserWarning", "ignore:.*fork.*:DeprecationWarning"
)

FORMS: dict[str, Callable[[Path], object]] = {
    "dataset": lambda _: Rows(),
    "two workers": lambda _: dpfy.lazy(Rows(), workers=2, prefetch=1),
    "loader": lambda _: DataLoader(Rows(), batch_size=7, shuffle=True, drop_last=True),
    "loader with a worker": lambda _: DataLoader(
        Subset(Rows(), range(len(X))), batch_size=7, num_workers=1
    ),
    "loader of tensors": lambda _: DataLoader(
        TensorDataset(X, Y), collate_fn=lambda items: tuple(default_collate(items))
    ),
    "memory map": lambda folder: (mapped(folder / "x.npy", X.numpy()), Y.numpy()),
}


def hugging_face(transformed: bool = False) -> Any:
    import datasets

    held = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    if not transformed:
        return held
    return held.with_transform(
        lambda rows: {
            "x": [torch.tensor(x) + torch.rand(()) for x in rows["x"]],
            "label": rows["label"],
        }
    )


def mapped(path: Path, array: np.ndarray) -> np.memmap:
    np.save(path, array)
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("form", FORMS)
def test_lazy_records_release_the_bits_of_records_in_memory(
    form: str, tmp_path: Path, in_memory: dict[str, torch.Tensor]
) -> None:
    assert equal(train(FORMS[form](tmp_path), tmp_path / "run"), in_memory)


def test_a_hugging_face_dataset_gives_dicts_of_tensors() -> None:
    import datasets

    records = as_source(hugging_face())
    batch = records.take(torch.tensor([3, 9, 3]))
    assert torch.equal(batch["x"], X[[3, 9, 3]])
    assert batch["label"].tolist() == Y[[3, 9, 3]].tolist()
    one, two = (
        dpfy.lazy(hugging_face(transformed=True)).take(torch.tensor([3, 9])) for _ in range(2)
    )
    assert torch.equal(one["x"], two["x"]), "a transform draws what the draw's key says"
    assert not torch.equal(one["x"], X[[3, 9]])
    padded = dpfy.lazy(
        hugging_face(), collate=lambda items: {"x": torch.stack([item["x"] for item in items])}
    )
    assert torch.equal(padded.take(torch.tensor([5]))["x"], X[[5]])
    with pytest.raises(InvalidInput, match=r"datasets.DatasetDict'; must be one split of it"):
        as_source(datasets.DatasetDict({"train": hugging_face()}))
    with pytest.raises(Unsupported, match="every plan draws records by number"):
        as_source(hugging_face().to_iterable_dataset())
    with pytest.raises(InvalidInput, match=r"batch\['name'\]\[0\]: got 'str'"):
        as_source(hugging_face().add_column("name", ["anna"] * len(X))).take(torch.tensor([0]))


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train((X, Y), tmp_path_factory.mktemp("memory") / "run")


def test_lazy_and_in_memory_agree_in_float64_and_padded(tmp_path: Path) -> None:
    pad = dpfy.Runtime(max_physical_batch=12, pad=True)
    held = train((X.double(), Y), tmp_path / "a", dtype=torch.float64, runtime=pad)
    assert equal(
        train(Rows(dtype=torch.float64), tmp_path / "b", dtype=torch.float64, runtime=pad), held
    )


def test_augmentation_is_drawn_afresh_and_the_same_by_any_number_of_workers(tmp_path: Path) -> None:
    class Noted(Rows):
        seen: ClassVar[list[tuple[int, float]]] = []

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = super().__getitem__(index)
            self.seen.append((index, float(x[0])))
            return x, y

    torch.manual_seed(1)
    here = train(Noted(augmented=True), tmp_path / "here", steps=30)
    # checks read some records twice; were the steps alike, under half of the values would differ
    assert len(set(Noted.seen)) > 0.7 * len(Noted.seen) > 500
    assert equal(
        train(dpfy.lazy(Rows(augmented=True), workers=2), tmp_path / "there", steps=30), here
    )


@pytest.mark.parametrize("first", [[4, 9], [9, 4], [9, 9, 4]])
def test_a_record_draws_the_same_whoever_stands_beside_it(first: list[int]) -> None:
    records = as_source(Rows(augmented=True))
    x, _ = records.take(torch.tensor(first))
    alone, _ = records.take(torch.tensor([9]))
    assert torch.equal(x[first.index(9)], alone[0])


def test_the_generators_of_the_loop_are_left_alone() -> None:
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    as_source(Rows(augmented=True)).take(torch.arange(5))
    assert torch.equal(torch.rand(2), first)


def test_a_worker_is_told_a_key_for_one_step_and_not_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    read = LazyRecords.read

    def noted(self: LazyRecords, draws: Any, device: torch.device) -> Any:
        return read(self, (told.append(draw) or draw for draw in draws), device)

    monkeypatch.setattr(LazyRecords, "read", noted)
    train(Rows(), tmp_path / "run", steps=4)
    secret = dpfy.core.randomness.Randomness.for_tests(5).secret
    keys = [draw.key for draw in told]
    assert secret not in keys
    assert len(set(keys)) == 5, "one for the sample, one for each step"


# --- death and resume
# ---------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a fork that does `work`."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_with_other_workers_the_bits_are_the_same(
    workers: int, tmp_path: Path
) -> None:
    whole = train(Rows(augmented=True), tmp_path / "whole")
    data = dpfy.lazy(Rows(augmented=True), workers=workers)
    assert in_child(lambda: train(data, tmp_path / "run", stop=5)) == -signal.SIGKILL
    assert equal(
        train(dpfy.lazy(Rows(augmented=True), workers=2 - workers), tmp_path / "run", resume=True),
        whole,
    )


@pytest.mark.parametrize(("fatal", "workers"), [(False, 0), (False, 1), (True, 1)])
def test_a_read_that_fails_loses_nothing(fatal: bool, workers: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    data = dpfy.lazy(Rows(trap=trap, fatal=fatal), workers=workers, prefetch=1)
    with pytest.raises(RuntimeError if fatal else OSError) as caught:
        train(data, tmp_path / "run", stop=3, trap=trap)
    assert any("resume" in note for note in caught.value.__notes__)
    if not fatal:
        assert any(note.startswith("while record") for note in caught.value.__notes__)
    trap.unlink()
    assert equal(train(data, tmp_path / "run", resume=True), train((X, Y), tmp_path / "whole"))


class Changed(Rows):
    """The small data as it looks later: longer, or with other values."""

    def __init__(self, length: int = len(X), factor: float = 1.0) -> None:
        super().__init__()
        self.length, self.factor = length, factor

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index % len(X))
        return self.factor * x, y


@pytest.mark.parametrize(
    "other",
    [Changed(length=len(X) + 1), Changed(factor=1.0001), (X, Y)],
    ids=["longer", "values", "memory"],
)
def test_other_data_is_refused_at_a_resume(other: object, tmp_path: Path) -> None:
    in_child(lambda: train(Changed(), tmp_path / "run", stop=3))
    with pytest.raises(InvalidInput, match="resume data: got 'another data'"):
        train(other, tmp_path / "run", resume=True)
    train(Changed(), tmp_path / "run", resume=True)


def test_the_fingerprint_tells_the_number_of_records() -> None:
    """Also where the sample is of the same records."""
    from dpfy.core.randomness import Randomness

    class Alike(Changed):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__getitem__(0)

    randomness = Randomness.for_tests(5)
    one, other = (
        dpfy.lazy(Alike(length=length)).fingerprint(randomness) for length in (1000, 1001)
    )
    assert one != other


def test_a_change_that_the_sample_misses_is_found_by_the_sum_of_a_step_made_again(
    tmp_path: Path,
) -> None:
    """Records outside of the sample change between the death and the resume, in a step that has its
    noise.
    """
    from dpfy.core.randomness import Randomness
    from dpfy.data import repeatable

    sampled = repeatable._sample(len(X), Randomness.for_tests(5))

    class Others(Rows):
        factor = 1.0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = super().__getitem__(index)
            return x * (1.0 if index in sampled else self.factor), y

    data = Others()

    def dies_after_the_noise() -> None:
        import dpfy.training.step as module

        made = module.hand_over

        def killed(*arguments: Any) -> None:
            made(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        module.hand_over = killed
        train(data, tmp_path / "run")

    assert in_child(dies_after_the_noise) == -signal.SIGKILL
    data.factor = 2.0
    with pytest.raises(InvalidInput, match="another sum of gradients"):
        train(data, tmp_path / "run", resume=True)


def test_a_dataset_that_grows_while_it_is_read_changes_nothing(
    tmp_path: Path, in_memory: dict[str, torch.Tensor]
) -> None:
    class Growing(Rows):
        length = len(X)

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            Growing.length += 1
            return super().__getitem__(index)

    assert equal(train(Growing(), tmp_path / "run"), in_memory)


# --- reserved before read, and what is refused
# ---------------------------------------------------------------------------------------


def test_nothing_is_read_before_the_plan_is_reserved(tmp_path: Path) -> None:
    ledger = tmp_path / "run" / "ledger.jsonl"

    class Asking(Rows):
        reads = 0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert b"reserve" in ledger.read_bytes()
            Asking.reads += 1
            return super().__getitem__(index)

    net = small.model()
    data = dpfy.lazy(Asking())
    training = dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, small.plan(4), tmp_path / "run"
    )
    assert Asking.reads == 0
    with training:
        entered = Asking.reads
        assert 0 < entered < len(X)
        next(training.batches())
        assert Asking.reads > entered


class Wild(Rows):
    """Its augmentation comes from a generator that nobody seeds."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + float(np.random.default_rng().normal()), y


class Missing(Rows):
    """Some values are not there."""

    def __init__(self, which: set[int]) -> None:
        super().__init__()
        self.which = which

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return (x * float("nan") if index in self.which else x), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def mixed_up(items: list[Any]) -> Any:
    x, y = default_collate(items)
    share = float(np.random.beta(1, 1)) if random_bit() else 1.0
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def random_bit() -> bool:
    return bool(torch.rand(()) < 0.8)


def centred(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x - x.mean(0), y


def sorted_rows(items: list[Any]) -> Any:
    return default_collate(sorted(items, key=lambda item: float(item[0][0])))


WEIGHTED = WeightedRandomSampler([1.0] * len(X), len(X))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "not repeatable": (Wild, "a record that is another one when it is read again"),
    "nan": (lambda: Missing({0}), "NaN or infinity in record 0"),
    "stream": (
        Stream,
        "an? Stream, which has no record number 7, is not supported; every plan draws records by "
        "number",
    ),
    "loader of a stream": (
        lambda: DataLoader(Stream()),
        "a DataLoader of an IterableDataset is not supported",
    ),
    "sampler": (
        lambda: DataLoader(Rows(), sampler=WEIGHTED),
        "a DataLoader with a WeightedRandomSampler of its own is not supported",
    ),
    "batch sampler": (
        lambda: DataLoader(Rows(), batch_sampler=[[0, 1]]),  # type: ignore[arg-type]
        "a DataLoader with a list of its own is not supported; the plan draws the records",
    ),
    "no batches": (
        lambda: DataLoader(Rows(), batch_size=None),
        "a DataLoader with batch_size=None",
    ),
    "mixup": (
        lambda: dpfy.lazy(Rows(), collate=mixed_up),
        "a collate function by which one record changes the row of another",
    ),
    "centred": (
        lambda: dpfy.lazy(Rows(), collate=centred),
        "a collate function by which one record changes the row of another",
    ),
    "sorted": (
        lambda: dpfy.lazy(Rows(), collate=sorted_rows),
        "a collate function by which one record changes the row of another",
    ),
    "dropped": (
        lambda: dpfy.lazy(Rows(), collate=lambda items: default_collate(items[1:] or items)),
        "must have a row for each of the",
    ),
    "names": (
        lambda: dpfy.lazy(Rows(), collate=lambda items: ["anna" for _ in items]),
        r"batch\[0\]: got 'str'; a batch holds tensors alone",
    ),
    "not a function": (lambda: dpfy.lazy(Rows(), collate=3), "collate: got 'int'"),  # type: ignore[arg-type]
    "workers": (lambda: dpfy.lazy(Rows(), workers=-1), "lazy.workers: got -1"),
    "views": (lambda: dpfy.lazy(Rows(), views=0), "lazy.views: got 0"),
    "another length": (lambda: Changed(length=3 * len(X)), "the plan was made for 200"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_refused_in_one_line_and_costs_nothing(
    case: str, tmp_path: Path
) -> None:
    make, message = REFUSED[case]
    net = small.model()
    run = dpfy.Run(tmp_path / "run", seed=5, ledger=tmp_path / "people.jsonl")

    def enter() -> None:
        with dpfy.PrivateTraining(
            net, torch.optim.SGD(net.parameters(), lr=0.1), make(), small.plan(4), run
        ):
            pass

    with pytest.raises(DpfyError, match=message) as caught:
        enter()
    assert "\n" not in str(caught.value)
    assert "anna" not in str(caught.value)
    assert not dpfy.Ledger.open(tmp_path / "people.jsonl").spent()


def test_a_record_that_is_not_finite_adds_nothing(tmp_path: Path) -> None:
    """Found in the middle of a run it is no error, which would tell that it was drawn: its gradient
    is left out by the clip rule.
    """
    from dpfy.core.randomness import Randomness
    from dpfy.data import repeatable

    sampled = set(repeatable._sample(len(X), Randomness.for_tests(5)))
    some = set(range(20, 60)) - sampled
    weights = train(Missing(some), tmp_path / "run")
    assert all(torch.isfinite(w).all() for w in weights.values())


class Words(Dataset[Any]):
    """Sentences of one to forty words."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": 1 + torch.arange(1 + index * 7 % 40) % 7, "label": int(Y[index])}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = torch.nn.utils.rnn.pad_sequence([item["words"] for item in items], batch_first=True)
    return {"words": words, "label": torch.tensor([item["label"] for item in items])}


class Attention(torch.nn.Module):
    """One attention over the words that are there, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 6)
        self.attention = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = torch.nn.Linear(6, small.CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        real = (words > 0)[..., None]
        seen = self.attention(self.embedding(words), src_key_padding_mask=~real[..., 0])
        return self.out((seen * real).sum(1) / real.sum(1))


def train_on_words(
    path: Path, *, resume: bool = False, stop: int | None = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Attention()
    recipe = dpfy.dpsgd(len(X), 4, steps=10, clip_norm=0.5).with_noise(2.0, delta=1e-3)
    run = dpfy.Run(path, seed=5, resume=resume, checkpoint_every=0.0)
    data, lengths = dpfy.lazy(Words(), collate=padded), set()
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, recipe, run
    ) as training:
        for batch in training.batches():
            if training.steps_done == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            lengths.add(batch["words"].shape[1])
            training.step(
                torch.nn.functional.cross_entropy(
                    net(batch["words"]), batch["label"], reduction="none"
                )
            )
    assert len(lengths) > 2 or resume
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_records_of_several_lengths_are_padded_and_a_resumed_run_goes_on_with_other_lengths(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidInput, match="records that do not stack to a batch"):
        as_source(Words()).take(torch.arange(5))
    whole = train_on_words(tmp_path / "whole")
    for stop in (1, 3):
        assert (
            in_child(lambda stop=stop: train_on_words(tmp_path / str(stop), stop=stop))
            == -signal.SIGKILL
        )
        assert equal(train_on_words(tmp_path / str(stop), resume=True), whole)


# --- views
# ---------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_equal_views_are_one_example_clipped_once(tmp_path: Path) -> None:
    """The mean over views inside of the loss: three equal views change nothing, though the clip
    norm binds.
    """
    double = torch.float64
    one, three = (
        train(
            dpfy.lazy(Rows(dtype=double), views=k),
            tmp_path / str(k),
            dtype=double,
            views=k,
            dropout=0.0,
        )
        for k in (1, 3)
    )
    assert max(float((one[name] - three[name]).abs().max()) for name in one) < 1e-12
    assert per_view(torch.tensor([1.0, 3.0, 5.0, 7.0]), views=2).tolist() == [2.0, 6.0]


def test_views_have_augmentation_of_their_own() -> None:
    x, y = dpfy.lazy(Rows(augmented=True), views=3).take(torch.tensor([4, 9]))
    assert x.shape == (2, 3, small.FEATURES)
    assert y.tolist() == [[int(Y[4])] * 3, [int(Y[9])] * 3]
    assert len(torch.unique(x[0], dim=0)) == 3
    assert not torch.allclose(x[0] - X[4], x[1] - X[9]), "and so have records"
    with pytest.raises(InvalidInput, match="one loss for each of the 3 views"):
        per_view(torch.zeros(7), 3)


def test_a_loader_says_in_one_line_what_the_plan_replaces() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        source = as_source(
            DataLoader(Rows(), batch_size=7, shuffle=True, drop_last=True, num_workers=2)
        )
    assert [str(w.message) for w in said if w.category is not ResourceWarning] == [
        "DataLoader(batch_size=7, shuffle=True, drop_last=True): the plan draws the batches "
        "instead; dataset, collate and workers are used"
    ]
    assert isinstance(source, LazyRecords)
    assert source.workers == 2
    assert rows_of(DataLoader(Rows())) == len(X)
    chosen = dpfy.lazy(DataLoader(Rows(), num_workers=2, prefetch_factor=5), workers=0)
    assert (chosen.workers, chosen.prefetch, dpfy.lazy(Rows()).prefetch) == (0, 5, 2)
    assert repr(source) == "LazyRecords(Rows, 2 workers)"


def test_workers_end_with_the_run(tmp_path: Path) -> None:
    import multiprocessing

    net = small.model()
    run = dpfy.Run(tmp_path / "run", seed=5)
    data = dpfy.lazy(Rows(), workers=2)
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, small.plan(4), run
    ) as training:
        batches = training.batches()
        x, y = next(batches)
        training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()
