from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfy.core.errors import DpfyError
from dpfy.data import DataConfig
from dpfy.data.source import load

X = np.linspace(-2.0, 3.0, 20).reshape(10, 2)
Y = np.arange(10) % 3


def npz(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    return str(folder / "data.npz")


def test_floats_without_a_range_are_kept(tmp_path: Path) -> None:
    source = load(DataConfig(kind="npz", path=npz(tmp_path, x=X, y=Y), classes=3))
    rows = torch.cat([source.train.tensors[0], source.test.tensors[0]])
    assert source.train.tensors[0].dtype == torch.float32
    assert sorted(rows.flatten().tolist()) == pytest.approx(sorted(X.flatten().tolist()), abs=1e-6)


def test_a_public_range_clamps_and_scales_to_the_unit_interval(tmp_path: Path) -> None:
    config = DataConfig(
        kind="npz",
        path=npz(tmp_path, x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2]),
        classes=3,
        range=(-1, 1),
    )
    source = load(config)
    np.testing.assert_allclose(
        source.train.tensors[0].numpy(), (np.clip(X, -1, 1) + 1) / 2, atol=1e-6
    )


def test_clamping_one_record_changes_no_other(tmp_path: Path) -> None:
    far = X.copy()
    far[3] = 1e6
    parts = {"x_test": X, "y_train": Y, "y_test": Y}
    first = load(
        DataConfig(kind="npz", path=npz(tmp_path, x_train=X, **parts), classes=3, range=(-1, 1))
    ).train.tensors[0]
    second = load(
        DataConfig(kind="npz", path=npz(tmp_path, x_train=far, **parts), classes=3, range=(-1, 1))
    ).train.tensors[0]
    same = [row for row in range(10) if torch.equal(first[row], second[row])]
    assert same == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_bytes_are_divided_by_255(tmp_path: Path) -> None:
    pixels = np.full((4, 2, 2), 51, dtype=np.uint8)
    source = load(
        DataConfig(kind="npz", path=npz(tmp_path, x=pixels, y=np.array([0, 1, 0, 1])), classes=2)
    )
    assert source.features == (2, 2)
    assert source.train.tensors[0].flatten().tolist() == pytest.approx([0.2] * (3 * 4))


def test_a_test_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=X[:, :1], y=Y)
    config = DataConfig(
        kind="npz", path=npz(tmp_path, x=X, y=Y), test_path=str(tmp_path / "test.npz"), classes=3
    )
    with pytest.raises(DpfyError, match="must have the shape of the training records"):
        load(config)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a": X, "b": Y},
            r"data.npz: got 'arrays a, b'; must hold x and y, or x_train, y_train, x_test, y_test",
        ),
        ({"x": X, "y": Y[:9]}, "x needs one row per label"),
        ({"x": X, "y": Y.astype(float)}, "y whole numbers"),
        ({"x": np.array([["a"]] * 10), "y": Y}, "x must be numbers"),
        (
            {"x": X, "y": Y + 1},
            r"labels\[2\]: got 'a value outside'; must be a class from 0 to 2, as declared",
        ),
        ({"x": np.where(X[4, 1] == X, np.nan, X), "y": Y}, "NaN or infinity in record 4"),
        ({"x": np.where(X[4, 1] == X, np.inf, X), "y": Y}, "NaN or infinity in record 4"),
        (
            {"x": np.array([{"an": "object"}] * 10, dtype=object), "y": Y},
            "holds pickled objects, which are never loaded",
        ),
    ],
)
@pytest.mark.parametrize("public", [None, (-1.0, 1.0)])
def test_bad_arrays_are_refused_in_one_line(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str, public: tuple[float, float] | None
) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        load(DataConfig(kind="npz", path=npz(tmp_path, **arrays), classes=3, range=public))
    assert "\n" not in str(caught.value)


def test_a_pickle_instead_of_an_archive_is_never_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "ran"),))

    (tmp_path / "data.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DpfyError, match="not an NPZ archive"):
        load(DataConfig(kind="npz", path=str(tmp_path / "data.npz"), classes=3))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.99])
def test_a_torn_archive_is_refused(tmp_path: Path, keep: float) -> None:
    path = Path(npz(tmp_path, x=X, y=Y))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DpfyError, match="truncated or damaged"):
        load(DataConfig(kind="npz", path=str(path), classes=3))


def test_a_flipped_byte_in_the_values_is_refused(tmp_path: Path) -> None:
    path = Path(npz(tmp_path, x=X, y=Y))
    content = bytearray(path.read_bytes())
    content[content.index(X[5].tobytes())] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DpfyError, match="truncated or damaged"):
        load(DataConfig(kind="npz", path=str(path), classes=3))
