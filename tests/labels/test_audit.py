"""The label-inference audit certifies most of epsilon, and no more; `dpfy audit labels`; figures of
stored runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from calls import call, refused

from dpfy.audit import one_run as audited
from dpfy.core.errors import Unsupported
from dpfy.labels.audit import inferred
from dpfy.labels.method import LabelMethod


@pytest.mark.parametrize("name", ["rr", "lp-mst", "alibi"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_most_of_epsilon_is_certified(name, epsilon):
    """White-box, 20,000 labels, 95% confidence: the bound is right, and at least 0.7 of epsilon."""
    verdict = audited.inference(*inferred(LabelMethod(name), epsilon, 20_000, 3), epsilon=epsilon)
    assert not verdict.violated
    assert verdict.bound.epsilon >= 0.7 * epsilon
    assert 0 < verdict.bound.detail["advantage"] < np.tanh(epsilon / 2) + 0.02


def test_half_of_the_claim_is_contradicted():
    scores, coins = inferred(LabelMethod("rr"), 2.0, 20_000, 3)
    assert audited.inference(scores, coins, epsilon=1.0).violated
    with pytest.raises(Unsupported, match="single labels"):
        inferred(LabelMethod("clusters"), 1.0, 100, 3)


def test_command(capsys):
    status, out, _ = call(capsys, "audit", "labels", "--epsilon", "1", "--json")
    told = json.loads(out)
    assert status == 0
    assert 0.7 < told["epsilon_lower"] <= 1.0
    assert "--canaries" in refused(capsys, "audit", "labels", "--canaries", "1")
    assert "method" in refused(capsys, "audit", "labels", "--method", "guess")
