"""Records among the weights: a parameter or buffer that holds a record, or a statistic of all of
them, would be released as it is.

A model that was filled from the training data (prototypes, a memory of neighbours, an embedding
table, a layer that standardises) tells what it was filled with. Frozen weights and buffers are
released without noise; trained ones depend on where they began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.data.batch import leaves
from dpfy.data.lazy import RecordSource
from dpfy.data.owners import stored
from dpfy.data.users import UserRecords
from dpfy.training.parallel.dtensor import local

WINDOW, WHOLE_WINDOW = 8, 24
"""Values in a row that make a copy: of real numbers, and of small whole numbers, which repeat by
chance.
"""
LEAST = 4
"""Records with fewer values are not looked for: numbers of one or two digits recur."""
DATA, WEIGHTS, PART = 1 << 26, 1 << 25, 1 << 20
"""Values that are looked at, at most: of the records, and of the model. Beyond that, parts of so
many, drawn by the run's secret.
"""
LAZY = 64
"""Records that are read for this where they are not in memory."""
PLACES = 6
"""Windows of a record from which the one with most different values is taken."""
BITS = 22
HALF = (torch.float16, torch.bfloat16)
CLOSE, FEATURES_CLOSE, SHORT = 2e-6, 2e-5, 5
"""How near a number is to a statistic to be taken for it, where it is one of few or of many; and
the digits of constants, which are not (the 0.1307 of MNIST, say).
"""
MANY, FEW = 256, 1 << 16

SETTING = (
    "settings are printed in the report and reach the weights: choose them without the training "
    "data"
)
RECORD = (
    "initial weights and buffers must tell nothing about the training data: fill them from public "
    "data, or release what they hold "
    "with noise; if what they hold is public, say so by Update(public_weights=True)"
)
STATISTIC = (
    "an exact statistic of the training data is released without noise: use dpfy.models.Normalisation or "
    "dpfy.query, or a figure of public "
    "data; if it is public, say so by Update(public_weights=True)"
)


def check(
    weights: Mapping[str, Tensor],
    settings: Iterable[float],
    records: RecordSource,
    randomness: Randomness,
) -> None:
    """Refuse a model of which a weight or buffer holds a record of the training data, or an exact
    statistic of all records.

    And settings of the optimizer that are a value of a record.

    Guarantees: a tensor that holds, in one piece, by rows or by columns, all values of a record's
    field, in its own type or in float16 or bfloat16, is refused, where data and model have at most
    `DATA` and `WEIGHTS` values and the record has enough different ones; so is one that is the
    mean, variance, deviation, least or largest value of each feature, each channel, or all values.
    Of larger data and models a part is looked at. What was computed from records in another way is
    not seen.
    """
    rng = randomness.generator("copies", 0)
    named = [(name, local(t.detach())) for name, t in weights.items() if _worth(t)]
    part = WEIGHTS / max(1, sum(t.numel() for _, t in named))
    for field in fields(records, rng):
        if any(_is_value(field, setting) for setting in settings):
            raise InvalidInput("optimizer", "a setting that is a value of a record", SETTING)
        if records.tensors and field.dim() > 1 and len(field) > 1 and field.numel() <= DATA:
            statistics = Statistics(field)
            for name, t in named:
                if statistics.has(t):
                    raise InvalidInput(name, "a statistic of the training data", STATISTIC)
        for dtype, group in _by_type(named).items():
            windows = _Windows.of(field.flatten(1), dtype) if field.dim() > 1 else None
            for name, t in group if windows is not None else []:
                if windows is not None and windows.anywhere(t, part, rng):
                    raise InvalidInput(name, "values of a record of the training data", RECORD)


def is_constant(value: float) -> bool:
    """Whether a number has few digits, as one that was chosen: 0.9 or 0.1307, and none that was
    measured.
    """
    return float(f"{value:.{SHORT}g}") in (value, float(np.float32(value))) or np.float32(
        f"{value:.{SHORT}g}"
    ) == np.float32(value)


def _is_value(field: Tensor, number: float) -> bool:
    """Whether a number is a value of `field`, to the last bit; one that many numbers of its type
    would be is not taken for one.
    """
    if (
        not field.is_floating_point()
        or is_constant(number)
        or (field.dtype != torch.float64 and field.numel() > FEW)
    ):
        return False
    return bool((field == torch.tensor(number, dtype=torch.float64, device=field.device)).any())


class Statistics:
    """The exact figures of a field: of each feature, of each channel, and of all values."""

    def __init__(self, field: Tensor) -> None:
        self._field = field
        self._known: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        last = field.dim() - 1
        over = [(0,), tuple(range(field.dim()))]
        over += (
            [tuple(k for k in range(field.dim()) if k != axis) for axis in {1, last}]
            if last > 1
            else []
        )
        self._ways = {
            int(np.prod([n for k, n in enumerate(field.shape) if k not in axes], initial=1)): axes
            for axes in over
        }

    def has(self, t: Tensor) -> bool:
        """Whether `t` is one of them, or the negative, the inverse or the square of one."""
        axes = self._ways.get(t.numel())
        if axes is None or not t.is_floating_point():
            return False
        flat = t.double().cpu().flatten()
        if not bool(flat.isfinite().all()) or (len(flat) > 1 and bool((flat == flat[0]).all())):
            return False
        if sum(is_constant(float(v)) for v in flat[:MANY]) * 2 > len(flat[:MANY]):
            return False
        return any(self._equal(flat, figure, spread) for figure, spread in self._figures(axes))

    def _equal(self, flat: Tensor, figure: Tensor, spread: Tensor) -> bool:
        near = CLOSE if len(flat) < LEAST else FEATURES_CLOSE
        return bool(((flat - figure).abs() <= near * torch.maximum(figure.abs(), spread)).all())

    def _figures(self, axes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """Figures, each with the size that an error of rounding is relative to."""
        if axes not in self._known:
            field = self._field.double()
            mean, low, high = field.mean(axes), field.amin(axes), field.amax(axes)
            count = field.numel() // max(1, mean.numel())
            variance = (field - field.mean(axes, keepdim=True)).square().sum(axes)
            found = [(mean, (variance / count).sqrt()), (low, low.abs()), (high, high.abs())]
            for divisor in {count, max(1, count - 1)}:
                deviation = (variance / divisor).sqrt()
                found += [(v, v.abs()) for v in (deviation, deviation.square())]
                some = deviation.clamp(min=1e-300)
                found += [(v, v.abs()) for v in (1 / some, 1 / some.square())]
                found += [(sign * mean / some, torch.ones_like(mean)) for sign in (-1, 1)]
            found.append((-mean, found[0][1]))
            self._known[axes] = [(v.flatten().cpu(), s.flatten().cpu()) for v, s in found]
        return self._known[axes]


def _worth(t: Tensor) -> bool:
    return (
        t.numel() > 0
        and not t.is_complex()
        and t.dtype != torch.bool
        and not t.is_sparse
        and t.device.type != "meta"
    )


def fields(records: RecordSource, rng: np.random.Generator, lazy: int = LAZY) -> list[Tensor]:
    """The fields of the records, one record in each row: all of them, or as many as are looked at,
    drawn by the secret.
    """
    if isinstance(records, UserRecords):
        found = list(records.alone().tensors)
    elif held := stored(records):
        found = list(held)
    else:
        few = np.sort(rng.permutation(len(records))[:lazy])
        flat = records.rows_each > 1
        found = [
            t.flatten(0, 1) if flat and t.dim() > 1 else t
            for t in leaves(records.take(torch.from_numpy(few)))
        ]
    for k, t in enumerate(found):
        most = max(1, DATA // max(1, t[0].numel()))
        if len(t) > most:
            found[k] = t[torch.from_numpy(np.sort(rng.permutation(len(t))[:most])).to(t.device)]
    return [t for t in found if not t.is_complex() and t.dtype != torch.bool and t.numel()]


def _by_type(named: list[tuple[str, Tensor]]) -> dict[torch.dtype, list[tuple[str, Tensor]]]:
    """The tensors by the types in which they are compared: their own, and half types in which they
    may have been stored before.
    """
    found: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, t in named:
        own = t.dtype if t.dtype in HALF else torch.float32
        found.setdefault(own, []).append((name, t))
        if t.dtype in (torch.float32, torch.float64):
            for half in HALF:
                found.setdefault(half, []).append((name, t))
    return found


class _Windows:
    """Of each record, the values of one window in which many differ, as numbers that are looked up
    in a tensor.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        self._values, self._dtype, self._width = values, dtype, values.shape[1]
        self._keys = _key(self._width)
        hashed = _hashed(values, self._keys)
        self._hashes = hashed.sort().values
        self._two = [self._width // 3, 2 * self._width // 3]
        self._table = torch.zeros(1 << BITS, dtype=torch.bool)
        self._table[_short([values[:, k] for k in self._two])] = True

    @classmethod
    def of(cls, flat: Tensor, dtype: torch.dtype) -> _Windows | None:
        """The windows of these records, of values that do not recur by chance; None where there are
        none.
        """
        real = flat.is_floating_point() and bool((flat[:64] != flat[:64].round()).any())
        width = min(flat.shape[1], WINDOW if real else WHOLE_WINDOW)
        if width < (WHOLE_WINDOW // 2 if not real else WINDOW if dtype in HALF else LEAST):
            return None
        best, most = None, None
        for start in _starts(flat, width):
            window = _plain(flat[:, start : start + width], dtype)
            score = _different(window)
            if best is None or most is None:
                best, most = window, score
            else:
                better = score > most
                best, most = (
                    torch.where(better[:, None], window, best),
                    torch.where(better, score, most),
                )
        assert best is not None
        assert most is not None
        if real:
            kept = best[most >= (6 if dtype in HALF else max(3, width // 2))]
        else:  # numbers of positions, and other runs of whole numbers, are no records
            steps = _different(best.view(torch.float32).diff(dim=1))
            kept = best[(most >= width // 2) & (steps >= width // 4)]
        return cls(kept, dtype) if len(kept) else None

    def anywhere(self, t: Tensor, part: float, rng: np.random.Generator) -> bool:
        """Whether one of the windows stands somewhere in `part` of `t`, along its rows or its
        columns.
        """
        ways = [t] if t.dim() < 2 else [t, t.flatten(1).t()]
        return any(
            self._along(piece) for way in ways for piece in _parts(way.reshape(-1), part, rng)
        )

    def _along(self, flat: Tensor) -> bool:
        if len(flat) < self._width:
            return False
        plain = _plain(flat, self._dtype)
        count = len(plain) - self._width + 1
        places = self._table[_short([plain[k : k + count] for k in self._two])].nonzero().flatten()
        if not len(places):
            return False
        hashed = _hashed(plain.unfold(0, self._width, 1)[places], self._keys)
        at = torch.searchsorted(self._hashes, hashed).clamp(max=len(self._hashes) - 1)
        places = places[self._hashes[at] == hashed]
        return any(self._same(plain[int(k) : int(k) + self._width]) for k in places[:64])

    def _same(self, window: Tensor) -> bool:
        return bool((self._values == window).all(1).any())


def _starts(flat: Tensor, width: int) -> list[int]:
    """Where windows in which many values differ begin in most records, by some of them: the rim of
    a picture tells nothing.
    """
    last = flat.shape[1] - width
    starts = torch.arange(0, last + 1, max(1, last // 2048))
    some = flat[:: max(1, len(flat) // 32)][:32]
    score = (
        _different(some[:, starts[:, None] + torch.arange(width)].flatten(0, 1))
        .view(len(some), -1)
        .double()
        .mean(0)
        .cpu()
    )
    order = score.argsort(descending=True, stable=True).tolist()
    chosen: list[int] = []
    for k in order:
        if all(abs(int(starts[k]) - other) >= width for other in chosen):
            chosen.append(int(starts[k]))
        if len(chosen) == PLACES:
            break
    return chosen


def _parts(flat: Tensor, part: float, rng: np.random.Generator) -> Iterator[Tensor]:
    """`flat` in pieces that overlap; of a model that is too large about `part` of them, at least
    one.
    """
    starts = np.arange(0, len(flat), PART)
    if part < 1:
        starts = np.sort(rng.permutation(starts)[: max(1, round(part * len(starts)))])
    for start in starts:
        yield flat[int(start) : int(start) + PART + WHOLE_WINDOW]


def _plain(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values as integers that are equal where the values are, in `dtype`. One zero."""
    return (values.to(dtype).float() + 0.0).cpu().contiguous().view(torch.int32)


def _different(window: Tensor) -> Tensor:
    """How many values of each row differ from all before them."""
    ordered = window.sort(1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)


def _key(width: int) -> list[int]:
    rng = np.random.default_rng(20_260_101)  # no secret: equal values are compared themselves
    return [int(k) | 1 for k in rng.integers(1, 1 << 62, width)]


def _hashed(windows: Tensor, keys: list[int]) -> Tensor:
    return sum(
        (windows[:, k].long() * key for k, key in enumerate(keys)),
        start=torch.zeros(len(windows), dtype=torch.int64),
    )


def _short(pair: list[Tensor]) -> Tensor:
    """A number of few bits for two values: what to look closer at."""
    return ((pair[0] * 1_000_003 + pair[1]) * -1_640_531_527 >> (32 - BITS)) & ((1 << BITS) - 1)
