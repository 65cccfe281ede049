"""Writes a made-up table of visits to a clinic, as such tables are: several rows of one patient,
cells that are missing or wrong, dates, free text, many codes.

    python examples/visits.py visits.csv [ROWS] [PATIENTS]

What is public about it, the list of codes, goes to codes.txt beside it. Patients of more than 60
years and those with a code of the chapter C come back more often.
"""

import csv
import random
import sys
from datetime import date, timedelta
from pathlib import Path

CODES = [f"{chapter}{number:02d}" for chapter in "ABCDEFGH" for number in range(100)]
WARDS = ("surgery", "medicine", "emergency", "maternity")
NOTES = ("sent home", "came by ambulance", "asks for a call", "allergic, see the letter", "")


def visits(rows: int = 20_000, patients: int = 6_000, seed: int = 1) -> list[dict[str, str]]:
    """The rows, the same for the same arguments."""
    drawn = random.Random(seed)
    ages = [drawn.randint(18, 90) for _ in range(patients)]
    often = [drawn.paretovariate(2) for _ in range(patients)]
    return [
        visit(drawn, patient, ages[patient])
        for patient in drawn.choices(range(patients), often, k=rows)
    ]


def visit(drawn: random.Random, patient: int, age: int) -> dict[str, str]:
    """One row."""
    code = CODES[min(drawn.randrange(800), drawn.randrange(800))]
    charge = 200 + 40 * age * drawn.random()
    chance = 0.1 + 0.35 * (age > 60) + 0.35 * code.startswith("C")
    back = "yes" if drawn.random() < chance else "no"
    written = drawn.choice(
        (f"{charge:.2f}", f"${charge:,.2f}" if charge > 1000 else f"{charge:.0f}")
    )
    day = date(2022, 1, 1) + timedelta(drawn.randrange(730))
    return {
        "patient": f"P{patient:05d}",
        "date": drawn.choices((day.isoformat(), "", "yesterday"), (96, 3, 1))[0],
        "age": drawn.choices((str(age), "", "999", "old"), (94, 3, 2, 1))[0],
        "ward": drawn.choices((drawn.choice(WARDS), "", "Ward 7"), (95, 3, 2))[0],
        "code": drawn.choices((code, "", "?"), (96, 2, 2))[0],
        "charge": drawn.choices((written, "", "inf"), (96, 3, 1))[0],
        "note": drawn.choice(NOTES),
        "readmitted": drawn.choices((back, "", "perhaps"), (97, 2, 1))[0],
    }


def write(out: Path, table: list[dict[str, str]]) -> None:
    """The table and the list of codes."""
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    out.with_name("codes.txt").write_text("\n".join(CODES) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), visits(*map(int, sys.argv[2:])))
