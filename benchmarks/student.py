"""PATE on MNIST, end to end: accuracy of released students at epsilon 1, delta 1e-5, and the
seconds that each took.

    python benchmarks/student.py --data-dir DATA                 # the last 1,000 test images
    measure, the other 9,000 are public inputs python benchmarks/student.py --data-dir DATA --folds
    10      # every tenth of the test images measures once: all 10,000 python benchmarks/student.py
    --data-dir DATA --fold 3        # the fourth tenth alone: so tenths can be run side by side

The 60,000 training images are private. Each run is whole: a folder with its bill, noise from the
operating system, a student, a card that is verified. Labels of test images measure at the end and
are used for nothing else. Beside the accuracy on images that the student did not see stands that on
its public inputs, whose labels it did not see. Prints one JSON line for each run, and one for all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import dpfy
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.prediction import student_claim, train_student
from dpfy.prediction.student import chances
from dpfy.runs.run import Run

EPSILON, DELTA, FOLDS = 1.0, 1e-5, 10
DECLARED = {
    "data": "9,000 test images of MNIST",
    "used_for": "questions and a student",
    "provenance": "public; labels not used",
}


def main() -> None:
    """One student for each fold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--folds", type=int, default=1, choices=range(1, FOLDS + 1))
    parser.add_argument("--fold", type=int, choices=range(FOLDS))
    parser.add_argument("--teachers", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=1000)
    given = parser.parse_args()
    held = source.load(DataConfig(kind="mnist", dir=given.data_dir))
    (x, y), (test, truth) = (part.tensors[:2] for part in (held.train, held.test))
    claim = student_claim(
        EPSILON, DELTA, teachers=given.teachers, classes=10, answers=given.answers
    )
    unseen, inputs = [], []
    for fold in (
        range(FOLDS - 1, FOLDS - 1 - given.folds, -1) if given.fold is None else (given.fold,)
    ):
        out = torch.arange(len(test)) * FOLDS // len(test) == fold
        began, cpu = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as place:
            run = Run(Path(place) / "run", public_data=(DECLARED,))
            found = train_student(run, claim, (x.numpy(), y.numpy()), test[~out])
            wrong = [finding for finding in dpfy.verify(run.path) if not finding.holds]
        taken, cpu = time.perf_counter() - began, time.process_time() - cpu
        said = chances(found.model, test).argmax(1) == truth
        unseen.append(float(said[out].double().mean()))
        inputs.append(float(said[~out].double().mean()))
        answers = truth[~out][torch.from_numpy(found.rows)] == torch.tensor(found.answers)
        told = {
            "epsilon": found.report["guarantee"]["epsilon"],
            "delta": DELTA,
            "sigma": claim.sigma,
            "verified": not wrong,
        }
        told |= {
            "answers_right": round(float(answers.double().mean()), 4),
            "unseen": round(unseen[-1], 4),
        }
        told |= {
            "public_inputs": round(inputs[-1], 4),
            "seconds": round(taken, 1),
            "cpu_seconds": round(cpu, 1),
        }
        print(json.dumps({"fold": fold} | told), flush=True)
    means = {
        "unseen": round(sum(unseen) / len(unseen), 5),
        "public_inputs": round(sum(inputs) / len(inputs), 5),
    }
    print(
        json.dumps({"runs": len(unseen), "images_unseen": len(test) // FOLDS * len(unseen)} | means)
    )


if __name__ == "__main__":
    main()
