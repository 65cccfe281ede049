"""Bills of the public votes of 250 teachers (Papernot et al. 2018): for all votes; for these votes,
made private; for these, exactly.

    python benchmarks/vote_bill.py --data-dir DATA      # DATA/pate-votes holds the three files

Each bill of these votes is a run: reserved, released with noise from the operating system,
verified. The exact one is a fact about votes, which are public here and never are elsewhere: it is
found by comparing, since it cannot be printed, and written to no file. Prints one JSON line for
each data set.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np

import dpfy
from dpfy.prediction import plan
from dpfy.prediction.claim import AnswersClaim
from dpfy.runs.run import Run
from dpfy_lab.data_dependent import analysis
from dpfy_lab.data_dependent.vote_bill import VoteBill, release_vote_bill

RUNS = 3
CLAIMS = {
    "mnist": AnswersClaim(
        "confident", 10, 250, 640, 283, sigma=40.0, check_sigma=150.0, threshold=200.0, delta=1e-5
    ),
    "adult": AnswersClaim(
        "confident", 2, 250, 1500, 539, sigma=40.0, check_sigma=200.0, threshold=300.0, delta=1e-5
    ),
    "svhn": AnswersClaim(
        "confident", 10, 250, 8500, 2970, sigma=40.0, check_sigma=200.0, threshold=300.0, delta=1e-6
    ),
}


def main() -> None:
    """Three data sets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    given = parser.parse_args()
    for name, answers in CLAIMS.items():
        content = (Path(given.data_dir) / "pate-votes" / f"{name}_250_teachers.npy.gz").read_bytes()
        votes = np.load(io.BytesIO(gzip.decompress(content)))[: answers.queries]
        claim, began = VoteBill.of(answers), time.process_time()
        found = [released(claim, votes) for _ in range(RUNS)]
        told = {
            "data": name,
            "delta": answers.delta,
            "for_all_votes": round(plan.spent(answers), 3),
        }
        told |= {
            "order": claim.order,
            "beta": claim.beta,
            "noise_multiplier": claim.noise_multiplier,
            "runs": RUNS,
        }
        for part in ("epsilon_of_these_answers", "epsilon_with_this_number"):
            told[part] = sorted(round(each[part], 3) for each in found)
        told["cpu_seconds"] = round(time.process_time() - began, 1)
        print(json.dumps(told | {"exact_not_private": exact(votes, answers)}), flush=True)


def released(claim: VoteBill, votes: np.ndarray) -> dict[str, float]:
    """One run, verified."""
    with tempfile.TemporaryDirectory() as place:
        found = release_vote_bill(Run(Path(place) / "run"), claim, lambda: votes)
        assert all(finding.holds for finding in dpfy.verify(Path(place) / "run"))
    return found


def exact(votes: np.ndarray, answers: AnswersClaim) -> float:
    """The exact figure to three digits, by comparing."""
    rule = analysis.ConfidentVote(answers.threshold, answers.check_sigma, answers.sigma)
    value, low, high = analysis.exact(votes, rule, answers.delta), 0, 20_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if value <= middle / 1000 else (middle, high)
    return high / 1000


if __name__ == "__main__":
    main()
