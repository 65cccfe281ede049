"""The published experiments as commands: the paper's number, ours at the same settings, and ours
with the best recipe we know.

A study is a list of cells, each stored by itself as soon as it is computed, and a page made from
the stored cells alone.
"""

from __future__ import annotations

import importlib

from dpfy.core import check
from dpfy.studies.study import Study

STUDIES: dict[str, str] = {
    "building-blocks": "dpfy.studies.building_blocks",
    "classical": "dpfy.studies.classical",
    "dpsgd-dpftrl": "dpfy.studies.dpsgd_dpftrl",
    "federated": "dpfy.studies.federated",
    "guide": "dpfy.studies.guide",
    "images": "dpfy.studies.images",
    "labels": "dpfy.studies.labels",
    "metric-text": "dpfy.studies.metric_text",
    "synthetic": "dpfy.studies.synthetic",
    "synthetic-images": "dpfy.studies.synthetic_images",
    "prediction": "dpfy.studies.prediction",
    "tuning": "dpfy.studies.tuning",
}
"""Name to module; each module holds one `STUDY`."""


def study(name: str) -> Study:
    """The study called `name`; an unknown name is an error that lists the known ones."""
    found: Study = importlib.import_module(STUDIES[check.one_of("study", name, STUDIES)]).STUDY
    return found
