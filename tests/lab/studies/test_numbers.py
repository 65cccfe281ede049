"""Closed forms of the studies against independently recomputed numbers, and the stored cells
against what we set out to reach.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy_lab.studies import STUDIES, building_blocks, dpsgd_dpftrl, guide, images, summary
from dpfy_lab.studies.page import spread
from dpfy_lab.studies.study import Results

ROOT = Path(__file__).parents[3] / "docs" / "studies"


@pytest.fixture(autouse=True)
def _stored_cells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which cells a study has depends on the data that is there: these tests are of the stored
    ones.
    """
    monkeypatch.delenv("DPFY_DATA", raising=False)


def kept(name: str) -> Results:
    return summary.kept(name, ROOT)[1]


def test_appendix_c() -> None:
    found = guide.appendix_c()
    golden = {
        "rdp one epoch": (1.2173, 1e-3),
        "rdp 100 epochs": (4.9519, 1e-3),
        "pld one epoch": (0.586786, 1e-4),
        "pld 100 epochs": (4.610567, 5e-4),
        "exponential mechanism": (3.2369, 1e-3),
        "gamma, eta 0": (0.001542115, 1e-8),
        "eta 0, mean 100": (2.4174, 1e-3),
        "P[K = 1], eta 0": (0.15421, 1e-4),
        "P[K < 50], eta 0": (0.6804, 1e-3),
        "eta 1, mean 100": (2.7595, 1e-3),
        "eta 1, mean 1000": (3.4515, 1e-3),
        "P[K < 50], eta 1, mean 100": (0.3889, 1e-3),
        "P[K < 100], eta 1, mean 1000": (0.0943, 1e-3),
        "poisson, rdp": (4.1801, 1e-3),
        "poisson, pld": (2.4872, 1e-3),
        "eta 0, mean 100, best order": (2.4118, 1e-3),
        "eta 1, mean 100, best order": (2.7403, 1e-3),
    }
    assert set(found) == set(golden)
    for name, (value, tolerance) in golden.items():
        assert found[name] == pytest.approx(value, abs=tolerance), name


@pytest.mark.parametrize(
    ("epsilon", "rdp", "exact"),
    [(1.0, 5.36558, 5.049660), (4.0, 1.617748, 1.550081), (16.0, 0.754278, 0.736057)],
)
def test_figure_1_at_a_batch_of_100_000(epsilon: float, rdp: float, exact: float) -> None:
    (row,) = guide.batch_curve(epsilon, (100_000,))["rows"]
    assert row["rdp"] == pytest.approx(rdp, rel=6e-3)
    assert exact * 0.99999 <= row["tight"] <= exact * 1.0005


def test_salary() -> None:
    row = next(row for row in building_blocks.salary()["rows"] if row["epsilon"] == 0.5)
    assert row["analytic"] == pytest.approx(805.762, abs=0.01)
    assert row["pei"] == pytest.approx(1025.537, abs=0.01)
    assert row["original"] == pytest.approx(1070.159, abs=0.01)


def test_noise_of_the_tries() -> None:
    assert building_blocks.plan_of("try1", 4000).noise_multiplier / 2 == pytest.approx(
        321.653, rel=1e-4
    )
    assert building_blocks.plan_of("try2", 4000).noise_multiplier / 2 == pytest.approx(
        64.0763, rel=1e-4
    )
    assert building_blocks.plan_of("try3", 4000).noise_multiplier == pytest.approx(3.4256, rel=1e-4)
    last = building_blocks.plan_of("try4", 4000)
    assert last.noise_multiplier == pytest.approx(4.2247, rel=1e-4)
    assert last.epsilon <= 1


def test_epsilons_of_the_printed_tables() -> None:
    rows = dpsgd_dpftrl.epsilons()["rows"]
    sgd = {(row["batch"], row["noise"]): row for row in rows if row["mechanism"] == "dp-sgd"}
    for noise, exact in ((1.0, 1.6717), (0.75, 3.3197), (0.5, 13.0754)):
        assert exact - 1e-4 <= sgd[256, noise]["tight 54000"] <= exact + 1e-3
    tree = {row["noise"]: row for row in rows if row["mechanism"] == "dp-ftrl"}
    for noise, fixed, rdp_fixed, rdp_reshuffled in (
        (25.0, 2.4449, 2.6527, 2.8450),
        (20.0, 3.1468, 3.4078, 3.6578),
        (8.0, 9.2359, 9.9151, 10.6993),
        (4.0, 22.3595, 23.7928, 25.8519),
    ):
        row = tree[noise]
        assert row["tight fixed"] == pytest.approx(fixed, abs=2e-4)
        assert row["rdp fixed"] == pytest.approx(rdp_fixed, rel=5e-4)
        assert row["rdp reshuffled"] == pytest.approx(rdp_reshuffled, rel=5e-4)


def test_the_settings_are_the_best_of_the_stored_sweeps() -> None:
    assert images.best({c.name: c for c in kept("images").starting("sweep-")}) == images.CHOSEN


def test_stored_runs_of_our_recipe_reach_what_was_asked() -> None:
    from dpfy_lab.studies.images_page import ASKED, grouped

    runs = grouped(kept("images"))
    for key, asked in ASKED.items():
        score = spread([run.result["test_accuracy"] for run in runs[key]])
        assert score["runs"] == 5
        assert score["worst"] >= asked
        assert all(run.result["epsilon"] <= key[1] for run in runs[key])


def test_stored_runs_on_cifar_have_the_best_settings_and_beat_the_least_asked() -> None:
    from dpfy_lab.studies import cifar10, cifar10_page

    results = kept("cifar10")
    found = cifar10.best({c.name: c for c in results.starting("sweep-")})
    assert {key: found[key] for key in cifar10.CHOSEN} == cifar10.CHOSEN
    for (name, epsilon), runs in cifar10_page.grouped(results).items():
        score = spread([run.result["test_accuracy"] for run in runs])
        assert score["runs"] == 3
        assert all(run.result["epsilon"] <= epsilon for run in runs)
        if epsilon < 8:
            assert score["worst"] >= cifar10_page.ASKED[name, epsilon][0]


@pytest.mark.parametrize("folder", ["building-blocks", "building-blocks-5000"])
def test_stored_tries_come_in_the_order_of_the_text(folder: str) -> None:
    results = kept(folder)

    def mean(name: str) -> float:
        runs = [results[f"{name}-{seed}"].result["test_accuracy"] for seed in range(5)]
        return float(spread(runs)["mean"])

    assert mean("try1") < mean("try2") <= mean("try3")
    assert mean("ours") >= 92


@pytest.mark.parametrize("folder", summary.SHOWN)
def test_pages_of_stored_cells(folder: str, tmp_path: Path) -> None:
    from dpfy_lab.studies.study import write_page

    page = write_page(*summary.kept(folder, ROOT), tmp_path)
    figures = {
        "building-blocks": 12,
        "building-blocks-5000": 12,
        "dpsgd-dpftrl": 14,
        "guide": 6,
        "images": 2,
        "cifar10": 1,
        "metric-text": 2,
        "federated": 1,
        "synthetic": 0,
        "synthetic-images": 0,
        "prediction": 1,
        "labels": 2,
        "classical": 2,
        "tuning": 0,
    }
    assert len(list(tmp_path.glob("*.svg"))) >= figures[folder]
    assert "None" not in page.read_text()


def test_every_study_is_stored_complete() -> None:
    assert {summary.VARIANTS.get(folder, (folder,))[0] for folder in summary.SHOWN} == set(STUDIES)
    for folder in summary.SHOWN:
        found, results = summary.kept(folder, ROOT)
        assert set(results) == {cell.name for cell in found.cells(results.options)}, folder


@pytest.mark.parametrize(
    ("prefix", "table", "points"),
    [
        ("sgd-mlp-256", dpsgd_dpftrl.TABLE_1, 1.0),
        ("sgd-lenet-256", dpsgd_dpftrl.TABLE_2, 1.0),
        ("ftrl", dpsgd_dpftrl.TABLE_3, 2.0),
    ],
)
def test_stored_runs_at_printed_settings_reach_the_printed_accuracies(
    prefix: str, table: dict, points: float
) -> None:
    from dpfy_lab.studies.dpsgd_dpftrl_page import runs_of

    results = kept("dpsgd-dpftrl")
    for noise, (_, printed) in table.items():
        runs = [run.result["test_accuracy"] for run in runs_of(results, f"{prefix}-{noise:g}")]
        assert len(runs) == 2
        assert abs(spread(runs)["mean"] - printed) <= points, (prefix, noise)
    assert results["plain-mlp"].result["test_accuracy"] >= 0.980
    assert results["plain-lenet"].result["test_accuracy"] >= 0.989


def test_stored_federations_keep_the_four_claims_at_one_epsilon() -> None:
    from dpfy_lab.studies import federated_page

    results = kept("federated")
    runs = federated_page.grouped(results)
    assert all(len(cells) == 5 for cells in runs.values())
    assert all(
        cell.result["epsilon"] <= 4.0 and cell.result["unit"] == "user" for cell in results.values()
    )
    assert [row[3] for row in federated_page.claims(runs)] == ["yes"] * 4


def test_the_tables_in_the_documentation_are_generated() -> None:
    file = ROOT.parent / "studies.md"
    assert summary.filled(file.read_text(), ROOT) == file.read_text(), (
        "run: python -m dpfy_lab.studies.summary docs"
    )


def test_more_eta_keeps_more_of_a_text_and_exact_choices_keep_most() -> None:
    table = summary.kept("metric-text", ROOT)[0].page(kept("metric-text")).tables()["words"]
    rows = {(row[0], row[1]): row for row in table.rows}
    for mechanism in ("noise", "choice"):
        found = [row for key, row in rows.items() if key[0] == mechanism]
        unchanged, kinds, following = ([row[k] for row in found] for k in (2, 4, 5))
        assert unchanged == sorted(unchanged)
        assert kinds == sorted(kinds, reverse=True)
        assert following == sorted(following)
    for eta in (5.0, 10.0, 15.0, 20.0, 30.0):
        assert rows["choice", eta][2] > rows["noise", eta][2]
    assert rows["choice", 20.0][6] > rows["as it is", None][6] - 3  # the speaker, in percent


def test_a_stored_search_beats_no_search_and_composition_at_one_epsilon() -> None:
    results = kept("tuning")
    arms = {
        arm: [results[f"{arm}-{seed}"].result for seed in range(5)]
        for arm in ("search-random", "search-composition", "untuned-default", "untuned")
    }
    assert all(run["epsilon"] <= 3.0 for runs in arms.values() for run in runs)
    assert not any(
        run["wrong"] for arm in ("search-random", "search-composition") for run in arms[arm]
    )
    assert all(run["training_alone"] < run["epsilon"] for run in arms["search-random"])
    means = {arm: sum(run["test_accuracy"] for run in runs) / 5 for arm, runs in arms.items()}
    assert means["search-random"] > means["untuned-default"]
    assert means["search-random"] > means["untuned"]
    assert means["search-random"] > means["search-composition"]


def test_stored_strategies_keep_the_guides_claims() -> None:
    tables = summary.kept("tuning", ROOT)[0].page(kept("tuning")).tables()
    for row in tables["scaling"].rows:
        apart, deviation = row[-2:]
        assert apart <= max(3 * deviation, 0.01), (
            "accuracy depends on more than the noise of the average"
        )
    assert len(tables["strategies"].rows) == 3
    assert all(row[-1] >= 0.99 for row in tables["strategies"].rows), "of the best of the full grid"
