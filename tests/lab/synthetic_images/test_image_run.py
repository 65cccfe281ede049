"""A synthesis of images in its folder: verified, resumed to the same bits wherever it was killed,
refused without a trace.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import dpfy
import dpfy_lab
from dpfy.accounting import RenyiFilter
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.report import html_page
from dpfy.runs.run import Run
from dpfy_lab.synthetic_images.claim import FACTS, IMAGES, MEASUREMENTS, SHEET
from dpfy_lab.synthetic_images.releases import ImageReleases
from dpfy_lab.synthetic_images.run import (
    ImageOptions,
    ImageSchema,
    ImageSettings,
    synthesize_images,
)

SCHEMA, TERMS = ImageSchema(8, 8, 10), ImageSettings(2.0, 1e-4)
FEW = ImageOptions(images=100, rounds=2)


def some_digits(count=300):
    x, y = load(DataConfig(kind="digits")).train.tensors
    return (x[:count, 0].numpy() * 255).astype(np.uint8), y[:count].numpy()


def made_in(place, data=None, terms=TERMS, options=FEW):
    return synthesize_images(
        some_digits() if data is None else data,
        schema=SCHEMA,
        terms=terms,
        run=place,
        options=options,
    )


class Halt(BaseException):
    """As a kill: nothing is undone."""


def test_a_folder_that_verifies(tmp_path):
    made = made_in(tmp_path / "run")
    assert all(finding.holds for finding in dpfy.verify(made.run))
    (opinion,) = [f.detail for f in dpfy.verify(made.run) if f.what == "second accountant agrees"]
    assert "dp-accounting: guarantee" in opinion
    images, labels = made.arrays
    assert images.shape == (100, 8, 8)
    assert images.dtype == np.uint8
    assert labels.shape == (100,)
    assert set(labels.tolist()) <= set(range(10))
    assert 1.99 < made.card["guarantee"]["epsilon"] <= 2.0
    assert not (made.run / "checkpoint").exists()
    assert made.card["sections"][0]["kind"] == "image-synthesis"
    assert sorted(p.name for p in made.run.iterdir()) == sorted(
        [
            IMAGES,
            SHEET,
            FACTS,
            MEASUREMENTS,
            "ledger.jsonl",
            "ledger.jsonl.head",
            "privacy.json",
            "report.html",
            "report.md",
        ]
    )


def test_the_sheet_is_in_the_report_and_cannot_be_changed(tmp_path):
    made = made_in(tmp_path / "run")
    page = (made.run / html_page.NAME).read_text()
    assert "data:image/png;base64," + html_page.extras(made.run)["sheet"] in page
    content = bytearray((made.run / SHEET).read_bytes())
    content[-20] ^= 1
    (made.run / SHEET).write_bytes(bytes(content))
    assert not all(finding.holds for finding in dpfy.verify(made.run))


def test_images_teach_what_digits_are(tmp_path):
    """A plain linear model that sees synthetic images alone, on digits that were held out: far
    above the one in ten of chance.
    """
    from sklearn.linear_model import LogisticRegression

    made = synthesize_images(
        "digits", terms=ImageSettings(10.0, 1e-4), run=Run(tmp_path / "run", seed=0)
    )
    images, labels = made.arrays
    assert abs(len(images) - 1438) < 100
    x, y = load(DataConfig(kind="digits")).test.tensors
    learner = LogisticRegression(max_iter=300).fit(images.reshape(len(images), -1) / 255, labels)
    assert learner.score(x.reshape(len(x), -1).numpy(), y.numpy()) > 0.8


def test_the_same_secret_gives_the_same_images(tmp_path):
    made = [made_in(Run(tmp_path / name, seed=3)) for name in "ab"]
    assert made[0].file.read_bytes() == made[1].file.read_bytes()
    assert made_in(Run(tmp_path / "c", seed=4)).file.read_bytes() != made[0].file.read_bytes()
    assert "fixed" in made[0].card["provenance"]["seed"]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_stopped_at_a_release_and_resumed_to_the_same_images(tmp_path, monkeypatch, step):
    whole, real = made_in(Run(tmp_path / "whole", seed=9)), ImageReleases.release
    for after in (False, True):

        def release(self, share, sums, after=after):
            if self.step == step and not after:
                raise Halt
            found = real(self, share, sums)
            if self.step == step + 1:
                raise Halt
            return found

        place = tmp_path / f"{after}"
        with monkeypatch.context() as patch:
            patch.setattr(ImageReleases, "release", release)
            with pytest.raises(Halt):
                made_in(Run(place, seed=9))
        assert not (place / IMAGES).exists()
        again = made_in(Run(place, resume=True, seed=9))
        for name in (IMAGES, SHEET, FACTS, MEASUREMENTS):
            assert (again.run / name).read_bytes() == (whole.run / name).read_bytes()
        assert all(finding.holds for finding in dpfy.verify(again.run))


def test_a_resumed_run_refuses_other_pictures(tmp_path, monkeypatch):
    def release(self, share, sums):
        raise Halt

    with monkeypatch.context() as patch:
        patch.setattr(ImageReleases, "release", release)
        with pytest.raises(Halt):
            made_in(tmp_path / "run")
    pixels, labels = some_digits()
    pixels[7, 3, 3] ^= 1
    with pytest.raises(InvalidInput, match="must be what the run had"):
        made_in(Run(tmp_path / "run", resume=True), (pixels, labels))
    with pytest.raises(InvalidInput, match=r"run|resume"):
        made_in(Run(tmp_path / "run", resume=True), terms=ImageSettings(3.0, 1e-4))
    with pytest.raises(InvalidInput, match="holds an unfinished run"):
        made_in(tmp_path / "run")


def test_killed_by_the_operating_system_and_resumed_to_the_same_images(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from dpfy.runs.run import Run
        from dpfy_lab.synthetic_images.releases import ImageReleases
        from dpfy_lab.synthetic_images.run import ImageOptions, ImageSettings, synthesize_images
        real = ImageReleases.release
        def release(self, share, sums):
            found = real(self, share, sums)
            if self.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        ImageReleases.release = release
        options = ImageOptions(images=100, rounds=2)
        synthesize_images("digits", terms=ImageSettings(2.0, 1e-4), run=Run("killed", seed=5), options=options)
    """)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(m.__file__).parents[1]) for m in (dpfy, dpfy_lab)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    whole = made_in(Run(tmp_path / "whole", seed=5), "digits")
    again = made_in(Run(tmp_path / "killed", resume=True, seed=5), "digits")
    assert again.file.read_bytes() == whole.file.read_bytes()
    assert all(finding.holds for finding in dpfy.verify(again.run))


def test_the_ledger_of_the_data_set_bears_the_bill_of_images(tmp_path):
    ledger, budget = tmp_path / "people.jsonl", RenyiFilter(3.0, 1e-4)
    made = made_in(Run(tmp_path / "a", ledger=ledger, budget=budget))
    assert all(finding.holds for finding in dpfy.verify(made.run, ledger=ledger))
    with pytest.raises(BudgetExceeded):
        made_in(Run(tmp_path / "b", ledger=ledger, budget=budget))
    assert not (tmp_path / "b").exists()
    assert len(Ledger.read(ledger).permits()) == 1


def test_bad_pictures_leave_nothing_and_cost_nothing(tmp_path):
    ledger, (pixels, labels) = tmp_path / "people.jsonl", some_digits()
    with pytest.raises(InvalidInput, match="8 x 8"):
        made_in(Run(tmp_path / "run", ledger=ledger), (pixels[:, :7], labels))
    assert not (tmp_path / "run").exists()
    assert Ledger.read(ledger).spent() == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: {"schema": None}, "how large"),
        (lambda: {"data": "digits", "schema": ImageSchema(9, 8, 10)}, "digits"),
        (lambda: {"schema": ImageSchema(400, 400, 10)}, "scale them"),
        (lambda: {"schema": ImageSchema(3, 3, 10)}, "height"),
        (lambda: {"schema": ImageSchema(8, 8, 0)}, "classes"),
        (lambda: {"options": ImageOptions(images=0)}, "images"),
        (lambda: {"options": ImageOptions(clusters=65)}, "clusters"),
        (lambda: {"options": ImageOptions(rounds=0)}, "rounds"),
        (lambda: {"options": ImageOptions(frequencies=1)}, "frequencies"),
        (lambda: {"terms": ImageSettings(0.0)}, "epsilon"),
        (lambda: {"terms": ImageSettings(1.0, 1.0)}, "delta"),
    ],
)
def test_what_is_wrong_for_a_public_reason_is_refused_before_pictures_are_read(
    tmp_path, asked, words
):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError("the data was read")

    def ask():
        about = {"data": Untouchable(), "schema": SCHEMA, "terms": TERMS} | asked()
        synthesize_images(about.pop("data"), run=tmp_path / "run", **about)

    with pytest.raises(DpfyError, match=words):
        ask()
    assert not (tmp_path / "run").exists()


def test_no_pictures_at_all_are_synthesized_as_ever(tmp_path):
    """Refusing would tell how many there are."""
    nothing = (np.zeros((0, 8, 8), np.uint8), np.zeros(0, np.int64))
    made = made_in(tmp_path / "run", nothing)
    assert len(made.arrays[0]) == 100
    assert all(finding.holds for finding in dpfy.verify(made.run))
