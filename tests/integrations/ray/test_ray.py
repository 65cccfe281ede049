"""Searches on a Ray cluster of two local workers: the same selection as in one process, and the law
of the best of a random number.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import dpfy
from dpfy.core.errors import Unsupported
from dpfy.runs.run import Run
from dpfy.tuning import planning
from dpfy.tuning.routes import SearchRoute
from dpfy.tuning.run import Execution, tune
from dpfy.tuning.trial import TrialFailed

ray = pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")
from ray import tune as ray_tune  # noqa: E402

from dpfy.integrations.ray import PrivateTuner, RayPool, space_of  # noqa: E402

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tuning")]
import toy  # noqa: E402
import trainables  # noqa: E402

SPACE = {"rate": ray_tune.loguniform(0.05, 5), "clip": ray_tune.choice([0.5, 1.0, 2.0])}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two workers on this machine, which import what this process imports."""
    paths = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[2] / "tuning"),
        str(Path(dpfy.__file__).parents[1]),
    ]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(paths)}},
    )
    yield
    ray.shutdown()


def test_two_workers_select_what_one_process_selects(tmp_path, capfd):
    config = ray_tune.TuneConfig(
        metric="accuracy", mode="max", num_samples=6, max_concurrent_trials=2
    )
    tuner = PrivateTuner(trainables.accuracy, SPACE, toy.recipe, toy.terms(trials=6), config)
    found = tuner.fit(Run(tmp_path / "ray", seed=12))
    alone = toy.search(tmp_path / "one", trials=6, seed=12)
    assert found.settings == alone.settings
    assert (tmp_path / "ray" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()
    assert all(f.holds for f in dpfy.verify(tmp_path / "ray"))
    out = capfd.readouterr()
    assert "rate" not in out.out + out.err


def test_the_selected_trial_has_the_law_of_the_best_of_a_random_number(tmp_path):
    """Trials scored by a uniform number: the best of K is below x with probability E[x^K]. False
    alarms: 1e-4; K = 1, 60 are rejected.
    """
    space, places = {"place": "0..1", "clip": [1.0], "rate": [1.0]}, []
    for seed in range(40):
        terms = toy.terms(trials=6, law="geometric")
        work = Execution(pool=RayPool(2))
        found = tune(
            trainables.own_place,
            space,
            toy.recipe,
            terms,
            Run(tmp_path / str(seed), seed=seed),
            work=work,
        )
        places.append(found.settings["place"])
    law = SearchRoute("random", 6.0, 1.0)
    best = np.vectorize(lambda x: planning.generating(law, x))
    assert stats.kstest(places, best).pvalue > 1e-4
    assert stats.kstest(places, lambda x: np.asarray(x) ** 60).pvalue < 1e-4
    assert stats.kstest(places, lambda x: np.asarray(x)).pvalue < 1e-4


def test_spaces_of_ray_tune_are_read_and_others_refused():
    words = space_of(
        {**SPACE, "layers": ray_tune.randint(1, 5), "share": ray_tune.uniform(0, 0.5), "fixed": 3}
    ).words()
    assert words == {
        "rate": "0.05..5 log", "clip": "[0.5, 1.0, "
                                       "2.0]", "layers": "1..4 "
                                                         "whole", "share": "0..0.5", "fixed": "[3]",
    }  # fmt: skip
    for wrong in (
        ray_tune.grid_search([1, 2]),
        ray_tune.quniform(0, 1, 0.1),
        ray_tune.sample_from(lambda spec: 1),
    ):
        with pytest.raises(Unsupported, match=r"tune\.loguniform"):
            space_of({"rate": wrong})


def test_schedulers_and_failures_are_refused_without_a_word_about_the_trial(tmp_path):
    from ray.tune.schedulers import ASHAScheduler

    config = ray_tune.TuneConfig(metric="accuracy", mode="max", scheduler=ASHAScheduler())
    with pytest.raises(Unsupported, match="by composition"):
        PrivateTuner(trainables.accuracy, SPACE, toy.recipe, toy.terms(), config).fit(
            tmp_path / "run"
        )
    with pytest.raises(TrialFailed) as caught:
        PrivateTuner(trainables.fails, SPACE, toy.recipe, toy.terms()).fit(tmp_path / "run")
    assert "17" not in str(caught.value)
