"""Patches of convolutions against unfold, and every route of a convolution and of an embedding
against gradients written out.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from dpfy.gradients.per_example import arithmetic, convolution, embedding
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry
from dpfy.gradients.per_example.embedding import EmbeddingGradient
from dpfy.gradients.per_example.patches import Patched, Window


def shape(r: random.Random):
    kernel, stride = (r.randint(1, 5), r.randint(1, 5)), (r.randint(1, 3), r.randint(1, 3))
    padding = (r.randint(0, 3), r.randint(0, 3))
    size = tuple(max(k - 2 * p, 1) + r.randint(0, 9) for k, p in zip(kernel, padding, strict=True))
    return r.choice([1, 2, 3, 8]), size, kernel, stride, padding


def case(seed, batch=7):
    r = random.Random(seed)
    channels, size, kernel, stride, padding = shape(r)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, *size, dtype=torch.float64, generator=generator)
    weight = torch.randn(
        r.choice([1, 3, 8, 16]), channels, *kernel, dtype=torch.float64, generator=generator
    )
    y = F.conv2d(x, weight, None, stride, padding)
    g = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    return ConvolutionGradient(x, g, weight, Geometry(stride, padding, (1, 1), 1))


def each(part: ConvolutionGradient):
    """The gradient of every example by autograd."""
    weight = part.weight.clone().requires_grad_()
    how, found = part.geometry, []
    for x, g in zip(part.inputs, part.grads, strict=True):
        y = F.conv2d(x[None], weight, None, how.stride, how.padding)
        found.append(torch.autograd.grad(y, weight, g[None])[0])
    return torch.stack(found)


def check(part, rest, norms, expected):
    weights = torch.rand(len(expected), dtype=torch.float64)
    torch.testing.assert_close(
        norms.reshape(-1, len(expected)).sum(0), expected.flatten(1).square().sum(1)
    )
    total = rest.weighted_sum(weights)
    torch.testing.assert_close(
        total.reshape(expected.shape[1:]), torch.tensordot(weights, expected, dims=1)
    )


@pytest.mark.parametrize("seed", range(40))
def test_patches_are_those_of_unfold(seed):
    part = case(seed)
    how = part.geometry
    window = part._window()
    assert window is not None
    write = window.writer(3, part.inputs)
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):  # the memory is used again
        found = window.ordered(write(part.inputs[rows]))
        expected = F.unfold(
            part.inputs[rows], part.weight.shape[2:], padding=how.padding, stride=how.stride
        ).mT
        assert torch.equal(found.flatten(2), expected)


def test_both_layouts_are_tried():
    windows = [case(seed)._window() for seed in range(40)]
    assert {w.divided for w in windows if w is not None} == {True, False}
    assert Window(1, (28, 28), (8, 8), (2, 2), (3, 3), (14, 14)).divided
    assert not Window(16, (13, 13), (4, 4), (2, 2), (0, 0), (5, 5)).divided


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keep", [True, False])
def test_products_of_patches(monkeypatch, seed, keep):
    monkeypatch.setattr(convolution, "PATCH_ELEMENTS", 2000)
    part = case(seed)
    norms, rest = part._by_patches(part._window(), keep)
    assert isinstance(rest, Patched) == keep
    expected = each(part)
    check(part, rest, norms, expected)
    torch.testing.assert_close(rest.per_example(slice(2, 5)), expected[2:5])
    alive = torch.tensor([True, False] * 3 + [True])
    check(part, rest.cleaned(alive), (norms * alive), expected * alive.view(-1, 1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(8))
def test_channels_that_lie_last_in_memory(seed):
    part = case(seed)
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in (part.inputs, part.grads))
    last = ConvolutionGradient(x, g, part.weight, part.geometry)
    assert torch.equal(convolution.positions_last(g), g.flatten(2))
    for keep in (True, False):
        norms, rest = last._by_patches(last._window(), keep)
        check(last, rest, norms, each(part))


@pytest.mark.parametrize("seed", range(20))
def test_gram_matrices_of_patches(monkeypatch, seed):
    monkeypatch.setattr(convolution, "PATCH_ELEMENTS", 2000)
    part = case(seed)
    check(part, part, part._by_gram(part._window()), each(part))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("positions", [1, 10**9])
def test_the_route_that_is_chosen(monkeypatch, seed, positions):
    monkeypatch.setattr(arithmetic, "KEPT_POSITIONS", positions)
    part = case(seed)
    norms, rest = part.measured()
    check(part, rest, norms, each(part))


def test_bfloat16_patches_are_multiplied_in_float32():
    part = case(3)
    narrow = ConvolutionGradient(
        part.inputs.bfloat16(), part.grads.bfloat16(), part.weight.bfloat16(), part.geometry
    )
    norms, rest = narrow._by_patches(narrow._window(), keep=True)
    wide = ConvolutionGradient(
        narrow.inputs.double(), narrow.grads.double(), narrow.weight.double(), part.geometry
    )
    assert rest.dtype == torch.float32
    torch.testing.assert_close(norms, each(wide).flatten(1).square().sum(1), rtol=1e-5, atol=0)


def rows_case(kind, batch=9, positions=6, columns=4, count=5):
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, count, (batch, positions), generator=generator)
    grads = torch.randn(batch, positions, columns, dtype=torch.float64, generator=generator)
    if kind != "all different":
        grads = grads[:, :1].expand(-1, positions, -1)
    return EmbeddingGradient(index, grads.contiguous() if kind == "equal" else grads, count)


@pytest.mark.parametrize("kind", ["all different", "equal", "expanded"])
@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_embedding_rows(monkeypatch, kind, chunk):
    monkeypatch.setattr(embedding, "CACHE_ELEMENTS", chunk)
    part = rows_case(kind)
    norms, rest = part.measured()
    assert (rest.grads.stride(1) == 0) == (kind != "all different")
    check(part, rest, norms, part.per_example(slice(0, 9)))


@pytest.mark.parametrize("kind", ["all different", "equal"])
def test_embedding_rows_by_gram_matrices_and_with_short_integers(kind):
    part = rows_case(kind)
    expected = part.per_example(slice(0, 9))
    check(part, part, part._by_gram(), expected)
    short = EmbeddingGradient(part.index.int(), part.grads, part.count)
    norms, rest = short.measured()
    check(part, rest, norms, expected)


def test_examples_without_positions_have_no_gradient():
    part = EmbeddingGradient(torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0, 4), 5)
    norms, rest = part.measured()
    assert norms.shape[1] == 3
    assert float(norms.max()) < 1e-30  # what could have underflowed
    assert not rest.weighted_sum(torch.ones(3)).any()


@pytest.mark.parametrize("kind", ["all different", "equal"])
def test_examples_that_are_cleaned_away(kind):
    part = rows_case(kind)
    expected, keep = part.per_example(slice(0, 9)), torch.arange(9) != 4
    part.grads[4] = float("nan")
    _, rest = part.measured()
    total = rest.cleaned(keep).weighted_sum(torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(total, expected[keep].sum(0))


def test_one_position_that_differs_is_seen():
    part = rows_case("equal")
    part.grads[4, 5, 3] += 1e-12
    norms, rest = part.measured()
    assert rest.grads.stride(1) != 0
    check(part, rest, norms, part.per_example(slice(0, 9)))


@pytest.mark.parametrize("kind", ["all different", "equal"])
def test_an_example_that_is_not_finite_spoils_its_own_norm_only(kind):
    part = rows_case(kind)
    part.grads[4] = float("nan")
    norms, _ = part.measured()
    assert norms.sum(0).isfinite().tolist() == [i != 4 for i in range(9)]
    assert torch.equal(norms.sum(0)[5:], rows_case(kind).measured()[0].sum(0)[5:])


def test_narrow_rows():
    part = rows_case("all different")
    narrow = EmbeddingGradient(part.index, part.grads.bfloat16(), part.count)
    norms, rest = narrow.measured()
    exact = EmbeddingGradient(part.index, narrow.grads.double(), part.count).measured()[0]
    assert bool((norms >= exact).all())
    torch.testing.assert_close(norms, exact, rtol=1e-4, atol=0)
    assert rest.weighted_sum(torch.ones(9, dtype=torch.bfloat16)).dtype == torch.float32
