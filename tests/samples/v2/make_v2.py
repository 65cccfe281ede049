"""Makes the samples of this folder. Run it with the version of dpfy whose files are to be kept,
never with a later one: see README.md.

PYTHONPATH=CHECKOUT python make_v2.py OUT
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PAGES = ("trained",)
"""The run that keeps report.html."""

TRAIN = (
    "train --data digits --model linear --delta 1e-4 --batch-size 200 --steps 6 --epsilon 3 "
    "--set data.test=billed --out trained"
)
TUNE = (
    "tune digits --model linear --delta 1e-4 --set training.batch_size=200 --set training.steps=4 "
    "--epsilon 4 --route composition --trials 2 --score public --set data.test=public "
    "--over training.learning_rate=[0.1,1] --out tuned"
)
LEDGER = "ledger create people.jsonl --epsilon 9 --delta 1e-5"
CSV = str(EXAMPLES / "people.csv")
TABLE = f"--schema {EXAMPLES / 'people.schema.toml'} --ledger people.jsonl"


def dpfy_does(words: str) -> None:
    subprocess.run([sys.executable, "-m", "dpfy", *words.split()], check=True)


def main(out: Path) -> None:
    out.mkdir()
    os.chdir(out)
    dpfy_does(TRAIN)
    dpfy_does(LEDGER)
    dpfy_does(f"query {CSV} mean(age),count() {TABLE} --epsilon 1 --out queried")
    dpfy_does(f"synthesize {CSV} {TABLE} --epsilon 2 --out synthetic")
    dpfy_does(f"fit {CSV} {TABLE} --estimator logistic --target income --epsilon 1 --out fitted")
    dpfy_does(TUNE)
    for run in (path for path in out.iterdir() if path.is_dir()):
        page = run / "report.html"
        if run.name in PAGES:
            page.rename(page.with_name("report.html.txt"))
        else:
            page.unlink(missing_ok=True)
            (run / "report.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
