"""Exact noise: the released bits are those of real arithmetic, whatever floating point does, and
their law is the one that is billed.
"""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise import arbitrary_precision, exact, exact_single, gaussian, noise_buffers, schedule
from dpfy.noise.dense import dense
from dpfy.noise.schedule import Schedule
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    NormalisedBanded,
    SquareRoot,
    inverse_square_root_banded,
)
from dpfy.noise.tree import Tree

STEPS = 7
KNOWN = {
    "blt": Blt((0.98, 0.7), (0.2, 0.3)),
    "identity": Identity(),
    "inverse": inverse_square_root_banded(4),
    "schedule": Schedule((3, 97), (1.21, 1.0)),
    "banded": Banded((1.0, 0.7, 0.6, 0.5)),
    "normalised": NormalisedBanded((0.9, 0.6, 0.4), 100),
    "banded, scaled": Banded((5.7, 3.0, 2.0)),
    "tree": Tree("completed"),
    "tree, restarted": Tree("completed", restart=3, completion=True),
}
SHAPES = {"a": (30,), "turned": (7, 3), "none": (0, 2), "scalar": ()}


def stream_of(strategy, scale=1.3, seed=4, **more) -> NoiseStream:
    return NoiseStream(strategy, scale, Randomness.for_tests(seed), exact=True, **more)


def sums(size: float, dtype: torch.dtype, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        n: (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for n, shape in SHAPES.items()
    }
    made["turned"] = made["turned"].t().contiguous().t()
    return made


def run(
    stream: NoiseStream,
    size: float = 3.7,
    dtype: torch.dtype = torch.float32,
    bound: float = 0.7,
    steps: int = STEPS,
):
    """What is released, the sums, and the lattices."""
    state, seen, given, lattices = stream.init(sums(size, dtype)), [], [], []
    for step in range(steps):
        total = sums(size, dtype, step)
        given.append(total)
        lattices.append(stream._lattice(total, bound, dtype, step))
        released, state = stream.release(
            Bounded(total, Bound(l2=bound)), step, state, mock_permit(stream.event, steps)
        )
        seen.append(released.value)
    return seen, given, lattices


def flat(tensors) -> np.ndarray:
    return np.concatenate([t.double().numpy().reshape(-1) for t in tensors.values()])


def oracle_draw(stream: NoiseStream, address: int, count: int, bits: int = 64) -> list[mpmath.mpf]:
    """The draw of an address as the definition says, by another library for real numbers."""
    pairs = (count + 1) // 2
    buffer = bytearray(bits // 4 * pairs)
    stream.randomness.keystream(f"{stream.name} part 0", address)(memoryview(buffer))
    words = np.frombuffer(buffer, f"<i{bits // 8}").reshape(2, pairs).tolist()
    first, second = [], []
    for i, (a, b) in enumerate(zip(*words, strict=True)):
        digits = stream.randomness.key(f"{stream.name} digits {i}", address, 48)
        x, turn = (
            (mpmath.mpf(word) + mpmath.ldexp(int.from_bytes(part, "little"), -192))
            / 2 ** (bits - 1)
            for word, part in ((a, digits[:24]), (b, digits[24:]))
        )
        radius = mpmath.sqrt(-2 * mpmath.log(abs(x)))
        first.append(radius * mpmath.cospi(turn))
        second.append(radius * mpmath.sinpi(turn))
    return (first + second)[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_released_bits_are_those_of_real_arithmetic(name, dtype):
    """Against an oracle that knows no floating point: matrices in real numbers, draws by mpmath,
    one value at a time.
    """
    strategy, stream = KNOWN[name], stream_of(KNOWN[name], divisor=100.0)
    seen, given, lattices = run(stream, dtype=dtype)
    count = flat(given[0]).size
    with mpmath.workprec(300):
        draws = {}
        made: list[list[mpmath.mpf]] = []  # released less the sum, in units
        for step, (out, total, on) in enumerate(zip(seen, given, lattices, strict=True)):
            step_terms = schedule.of(strategy, step)
            noise = [mpmath.mpf(0)] * count
            for weight, at in step_terms.draws:
                if at not in draws:
                    alone = name in ("identity", "schedule") and dtype is torch.float32
                    draws[at] = oracle_draw(stream, at, count, 32 if alone else 64)
                noise = [n + mpmath.mpf(weight) * z for n, z in zip(noise, draws[at], strict=True)]
            if step_terms.past is not None:
                unit = mpmath.mpf(on.noise) * mpmath.mpf(on.step)
                rows = (
                    strategy.encoder(100)[: step + 1, : step + 1]
                    if name == "normalised"
                    else strategy.encoder(step + 1)
                )
                for back in range(step):
                    weight = (
                        mpmath.mpf(float(-rows[step, back]))
                        / mpmath.mpf(float(rows[step, step]))
                        / unit
                    )
                    noise = [n + weight * m for n, m in zip(noise, made[back], strict=True)]
            x = [mpmath.mpf(v) for v in flat(total).tolist()]
            cells = [
                int(mpmath.floor(v / on.step + on.noise * n)) for v, n in zip(x, noise, strict=True)
            ]
            made.append(
                [(k + mpmath.mpf(0.5)) * on.step - v for k, v in zip(cells, x, strict=True)]
            )
            expected = (
                torch.tensor(cells, dtype=dtype).add_(0.5).mul_(on.step / 100.0).double().numpy()
            )
            assert np.array_equal(flat(out), expected), (name, step)


@pytest.mark.parametrize("name", ["identity", "banded", "inverse", "blt"])
def test_floating_point_decides_nothing(name, monkeypatch):
    """With functions that are a little off, and with all decided by real numbers, the same bits are
    released.
    """
    reference = [flat(out) for out in run(stream_of(KNOWN[name]))[0]]
    honest = gaussian.Scratch.transform

    def off(self, factor=None):
        values = honest(self, factor)
        size = 1e-13 if values.dtype is torch.float64 else 1e-6
        return values.mul_(1 + size * torch.randn(values.shape, dtype=values.dtype))

    with monkeypatch.context() as patch:
        patch.setattr(gaussian.Scratch, "transform", off)
        assert all(
            map(np.array_equal, reference, [flat(out) for out in run(stream_of(KNOWN[name]))[0]])
        )
    with monkeypatch.context() as patch:
        patch.setattr(exact, "ERROR", 1.0)
        patch.setattr(exact_single, "ERROR", 1.0)
        known = exact_single.unit
        patch.setattr(
            exact_single,
            "unit",
            lambda words, places: (known(words, places)[0], np.full(len(places), np.inf)),
        )
        decided = []
        patch.setattr(
            arbitrary_precision,
            "floor",
            lambda *given, floor=arbitrary_precision.floor: decided.append(1) or floor(*given),
        )
        assert all(
            map(np.array_equal, reference, [flat(out) for out in run(stream_of(KNOWN[name]))[0]])
        )
        assert len(decided) == STEPS * len(reference[0])


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.float64, 2e-5)], ids=str)
def test_errors_within_what_is_trusted_change_no_bit(monkeypatch, dtype, off):
    """Many values, of which some errors would move dozens over a border on either side."""
    stream, total = (
        stream_of(Identity()),
        {"w": torch.linspace(-3, 3, 100_000 if dtype is torch.float32 else 10_000, dtype=dtype)},
    )
    monkeypatch.setattr(exact, "ERROR", 2.0**-11)
    monkeypatch.setattr(exact, "require", lambda: None)
    monkeypatch.setattr(exact, "FARTHEST", 4.0)
    honest, seen = gaussian.Scratch.transform, []
    for sign in (0, 1, -1):
        patched = lambda self, factor=None, size=sign * off: honest(self, factor).mul_(1 + size)  # noqa: E731
        monkeypatch.setattr(gaussian.Scratch, "transform", patched)
        seen.append(
            stream.release(Bounded(total, Bound(l2=1.0)), 0, {}, mock_permit(stream.event, 1))[
                0
            ].value["w"]
        )
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_machine_whose_functions_are_off_is_refused(monkeypatch):
    honest = gaussian.Scratch.transform
    monkeypatch.setattr(
        gaussian.Scratch,
        "transform",
        lambda self, factor=None: honest(self, factor).mul_(1 + 1e-11),
    )
    exact.require.cache_clear()
    with pytest.raises(Unsupported, match="double precision is off"):
        run(stream_of(Identity()), dtype=torch.float64)
    monkeypatch.setattr(
        gaussian.Scratch, "transform", lambda self, factor=None: honest(self, factor).mul_(1 + 1e-4)
    )
    exact_single.require.cache_clear()
    with pytest.raises(Unsupported, match="single precision is off"):
        run(stream_of(Identity()))
    monkeypatch.undo()
    exact.require()
    exact_single.require()


def test_a_sum_moves_the_cell_by_exactly_itself():
    """floor(x + whole number + noise) = floor(x + noise) + whole number: what makes the release
    post-processing.
    """
    stream = stream_of(Identity())
    count = 4000
    like = {"w": torch.zeros(count, dtype=torch.float64)}
    step = stream._lattice(like, 1.0, torch.float64, 0).step
    found = []
    for shift in (0.0, 0.25, 1.0, -3.0, 1024.0):
        total = {"w": torch.full((count,), shift * step, dtype=torch.float64)}
        out = stream.release(Bounded(total, Bound(l2=1.0)), 0, {}, mock_permit(stream.event, 1))[
            0
        ].value["w"]
        found.append(torch.floor(out / step))
    zero, quarter, *whole = found
    for shift, cells in zip((1.0, -3.0, 1024.0), whole, strict=True):
        assert torch.equal(cells, zero + shift)
    assert ((quarter - zero == 0) | (quarter - zero == 1)).all()
    assert float((quarter - zero).mean()) == pytest.approx(
        0.25, abs=0.04
    )  # a coin that is not biased: 5.8 standard errors


@pytest.mark.parametrize("x", [0.0, 0.37, -1000.81])
def test_cells_have_the_law_that_is_billed(x):
    """Chi-square against the exact probabilities; 0.98 and 1.02 of the scale, and a sum a step
    away, are rejected.
    """
    from scipy.stats import chi2, norm

    count, stream = 400_000, stream_of(Identity())
    on = stream._lattice({"w": torch.zeros(count)}, 1.0, torch.float32, 0)
    total = {"w": torch.full((count,), x * on.step)}
    out = stream.release(Bounded(total, Bound(l2=1.0)), 0, {}, mock_permit(stream.event, 1))[
        0
    ].value["w"]
    cells = torch.floor(out.double() / on.step).numpy()
    edges = np.arange(-120, 121) + math.floor(x)

    def p_value(factor=1.0, shift=0.0):
        inside = norm.cdf((edges - x - shift) / (on.noise * factor))
        expected = count * np.concatenate([[inside[0]], np.diff(inside), [1 - inside[-1]]])
        seen = np.histogram(cells + 0.5, np.concatenate([[-1e9], edges, [1e9]]))[0]
        return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(expected) - 1))

    assert p_value() > 1e-6
    assert max(p_value(0.98), p_value(1.02), p_value(shift=1.0)) < 1e-6


@pytest.mark.parametrize("bits", [32, 64])
def test_the_tail_and_the_middle_are_decided_by_real_numbers(monkeypatch, bits):
    """Words of which floating point holds too few digits: u next to 0 and next to 1."""
    top = 2 ** (bits - 1)
    words = [0, -1, 1, 5, -(top >> 28), top - 1, -top, top >> 1, 3 * (top >> 2)]
    angles = [0, top >> 2, top >> 1, -(top >> 1), top - 1, -top, 12345, -(top >> 2), top >> 3]

    def keystream(self, stream, step, start=0):
        return lambda buffer: buffer.cast("B").__setitem__(
            slice(None), np.array(words + angles, f"<i{bits // 8}").tobytes()
        )

    monkeypatch.setattr(Randomness, "keystream", keystream)
    exact.require.cache_clear()
    monkeypatch.setattr(exact, "require", lambda: None)
    monkeypatch.setattr(exact_single, "require", lambda: None)
    dtype = torch.float64 if bits == 64 else torch.float32
    stream, count = stream_of(Identity(), scale=1.0), 2 * len(words)
    if bits == 64:
        _, unknown = next(exact.Draws(stream.randomness, stream.name, count).chunks(0, 1.0))
        assert {0, 1, 2, 3, 4, 5, 6} <= set(unknown.tolist())
        assert 7 not in unknown
    total = {"w": torch.zeros(count, dtype=dtype)}
    on = stream._lattice(total, 1.0, dtype, 0)
    out = stream.release(Bounded(total, Bound(l2=1.0)), 0, {}, mock_permit(stream.event, 1))[
        0
    ].value["w"]
    with mpmath.workprec(300):
        expected = [int(mpmath.floor(on.noise * z)) for z in oracle_draw(stream, 0, count, bits)]
    assert torch.floor(out / on.step).tolist() == expected


def test_single_precision_says_how_far_off_it_is():
    single, double = exact_single.disagreement(
        exact.Draws(Randomness.for_tests(5), "x", 1 << 16, torch.float32), 100
    )
    assert single < exact_single.ERROR / 4
    assert double < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_two_draws_share_a_key(monkeypatch, dtype):
    """Everything decided by real numbers, over several chunks and steps: each chunk has its
    keystream, each pair its digits.
    """
    asked: list[tuple[str, int]] = []
    honest = Randomness.keystream, Randomness.key
    monkeypatch.setattr(
        Randomness,
        "keystream",
        lambda self, name, step: asked.append((name, step)) or honest[0](self, name, step),
    )
    monkeypatch.setattr(exact, "ERROR", 1.0)
    monkeypatch.setattr(exact_single, "ERROR", 1.0)
    monkeypatch.setattr(exact, "CHUNK", 16)
    monkeypatch.setattr(
        exact_single,
        "unit",
        lambda words, places: (np.zeros(len(places)), np.full(len(places), np.inf)),
    )
    monkeypatch.setattr(exact, "require", lambda: None)
    monkeypatch.setattr(exact_single, "require", lambda: None)
    stream, digits = stream_of(Identity()), set()
    monkeypatch.setattr(
        Randomness,
        "key",
        lambda self, name, step, size=16: (
            digits.add((name, step, size)) or honest[1](self, name, step, size)
        ),
    )
    for step in range(2):
        stream.release(
            Bounded({"w": torch.zeros(40, dtype=dtype)}, Bound(l2=1.0)),
            step,
            {},
            mock_permit(stream.event, 9),
        )
    parts = {(f"noise part {chunk}", step) for chunk in range(3) for step in range(2)}
    assert set(asked) == parts
    assert (
        len([name for name, _, size in digits if size == 2 * arbitrary_precision.DIGITS]) == 40
    )  # twenty pairs in each step


def test_long_sums_and_several_chunks(monkeypatch):
    """Sums of thousands of steps, and chunks that end inside of tensors, change nothing."""
    reference = [flat(out) for out in run(stream_of(Identity()), size=3000.0)[0]]
    monkeypatch.setattr(exact_single, "SMALL", 0.0)
    assert all(
        map(
            np.array_equal,
            reference,
            [flat(out) for out in run(stream_of(Identity()), size=3000.0)[0]],
        )
    )
    stream, count = stream_of(Identity()), 2 * exact.CHUNK + 11
    parts = {"a": torch.linspace(-1, 1, 1000), "b": torch.linspace(-1e3, 1e3, count - 1000)}
    whole = {"w": torch.cat(list(parts.values()))}
    one, other = (
        stream.release(Bounded(t, Bound(l2=1.0)), 3, {}, mock_permit(stream.event, 9))[0].value
        for t in (parts, whole)
    )
    on = stream._lattice(whole, 1.0, torch.float32, 3)
    assert on == stream._lattice(whole, 1.0, torch.float32, 3)
    assert np.array_equal(
        np.round(flat(one) / on.step - 0.5), np.round(flat(other) / on.step - 0.5)
    )
    draws = exact.Draws(stream.randomness, "noise", count, torch.float32)
    for place in (exact.CHUNK + 3, count - 1):
        expected = arbitrary_precision.floor(
            [float(whole["w"][place]) / on.step],
            [(arbitrary_precision.Decimal(on.noise), draws.value(3, place))],
        )
        assert math.floor(flat(other)[place] / on.step) == expected


def test_remembered_noise_makes_up_for_the_cell():
    """C times what was released less C times the sums is a draw of each step, but for half a step:
    nothing else is added up.
    """
    strategy, steps = Banded((1.0, 0.7, 0.6, 0.5)), 40
    stream = stream_of(strategy)
    seen, given, lattices = run(stream, steps=steps, dtype=torch.float64)
    made = strategy.encoder(steps) @ (
        np.array([flat(out) for out in seen]) - np.array([flat(total) for total in given])
    )
    unit = lattices[0].step * lattices[0].noise
    draws = exact.Draws(stream.randomness, stream.name, made.shape[1])
    drawn = np.array([next(draws.chunks(s, 1.0))[0].numpy().copy() for s in range(steps)])
    assert np.abs(made - unit * drawn).max() <= lattices[0].step * (0.5 + 1e-6)


@pytest.mark.parametrize(
    "strategy", [SquareRoot(), dense(np.eye(3)), Tree("honaker")], ids=lambda s: type(s).__name__
)
def test_what_cannot_be_exact_is_refused_with_the_way_out(strategy):
    with pytest.raises(Unsupported, match=r"exact noise for the strategy.*band-mf"):
        stream_of(strategy)


def test_no_number_and_no_room():
    """Sums that are not finite stay so and nothing else changes; too many coordinates for the
    memory's rounding are refused.
    """
    stream, good = stream_of(Identity()), sums(3.7, torch.float32)
    reference = flat(
        stream.release(Bounded(good, Bound(l2=0.7)), 0, {}, mock_permit(stream.event, 1))[0].value
    )
    bad = {n: t.clone() for n, t in good.items()}
    bad["a"][3], bad["a"][5] = math.nan, math.inf
    found = flat(
        stream.release(Bounded(bad, Bound(l2=0.7)), 0, {}, mock_permit(stream.event, 1))[0].value
    )
    places = [i for i in range(len(reference)) if i not in (3, 5)]
    assert np.array_equal(found[places], reference[places])
    assert not np.isfinite(found[[3, 5]]).any()
    with pytest.raises(Unsupported, match="coordinates"):
        exact.lattice(1e4, 1.0, 10**12, torch.float32, schedule.of(KNOWN["banded"], 0), 0)
    blt = stream_of(KNOWN["blt"])
    with pytest.raises(InvalidInput, match="noise state"):
        blt.release(Bounded(good, Bound(l2=0.7)), 3, {}, mock_permit(blt.event, 9))


@pytest.mark.parametrize("row", [0, 1])
def test_remembered_noise_that_grows_beyond_what_is_covered_ends_the_run(row):
    """In any buffer, for any value of it."""
    stream, total = stream_of(KNOWN["blt"]), sums(3.7, torch.float32)
    state = stream.init(total)
    state[noise_buffers.PAST][row, 17] = -700.0  # of which the step itself takes some back
    with pytest.raises(Unsupported, match="hundreds of standard deviations"):
        stream.release(Bounded(total, Bound(l2=0.7)), 1, state, mock_permit(stream.event, 9))


def test_the_rounding_of_memory_is_covered():
    """What double precision can lose over a long run with many coordinates is in the noise, and it
    is next to nothing.
    """
    for name in ("banded", "banded, scaled", "normalised", "blt"):
        step_terms = schedule.of(KNOWN[name], 5)
        on = exact.lattice(10.0, 1.0, 124_000_000, torch.float32, step_terms, 5)
        added = on.noise * on.step / 10 - 1
        assert (
            2 * 10 * exact.lost(step_terms.past) * math.sqrt(124e6 * exact.STEPS)
            <= added
            <= 2.0**-10
        )
    on = exact.lattice(1.3, 0.7, 9, torch.float32, schedule.of(Identity(), 0), 0)
    assert Fraction(on.noise) * Fraction(on.step) >= Fraction(1.3) * Fraction(0.7)
