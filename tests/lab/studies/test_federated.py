"""The study of federated training in its short form, on embedded images."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy_lab.studies import federated, federated_page
from dpfy_lab.studies.study import Options, run, stored


@pytest.mark.slow
def test_the_short_form_ends_in_a_page(tmp_path: Path) -> None:
    page = run(federated.STUDY, Options(fast=True), tmp_path)
    assert "What was to be shown" in page.read_text()
    runs = federated_page.grouped(stored(federated.STUDY, Options(fast=True), tmp_path))
    assert set(runs) == set(federated.ROWS)
    assert len(federated_page.claims(runs)) == 4
