"""The published experiments as commands: the paper's number, ours at the same settings, and ours
with the best recipe we know.

A study is a list of cells, each stored by itself as soon as it is computed, and a page made from
the stored cells alone.
"""

from __future__ import annotations

import importlib

from dpfy.core import check
from dpfy_lab.studies.study import Study

STUDIES: dict[str, str] = {
    "building-blocks": "dpfy_lab.studies.building_blocks",
    "cifar10": "dpfy_lab.studies.cifar10",
    "classical": "dpfy_lab.studies.classical",
    "dpsgd-dpftrl": "dpfy_lab.studies.dpsgd_dpftrl",
    "federated": "dpfy_lab.studies.federated",
    "guide": "dpfy_lab.studies.guide",
    "images": "dpfy_lab.studies.images",
    "labels": "dpfy_lab.studies.labels",
    "metric-text": "dpfy_lab.studies.metric_text",
    "synthetic": "dpfy_lab.studies.synthetic",
    "synthetic-images": "dpfy_lab.studies.synthetic_images",
    "prediction": "dpfy_lab.studies.prediction",
    "tuning": "dpfy_lab.studies.tuning",
}
"""Name to module; each module holds one `STUDY`."""


def study(name: str) -> Study:
    """The study called `name`; an unknown name is an error that lists the known ones."""
    found: Study = importlib.import_module(STUDIES[check.one_of("study", name, STUDIES)]).STUDY
    return found
