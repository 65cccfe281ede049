"""The layout is enforced: who may import whom, and that the calculator never pays for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dpfy"

BELOW_PLAN = {"core", "accounting", "mechanisms", "sampling", "gradients", "noise"}
ABOVE_PLAN = BELOW_PLAN | {
    "plan",
    "models",
    "isolation",
    "tables",
    "engines",
    "data",
    "report",
    "runs",
    "training",
    "audit",
    "statistics",
    "queries",
}
MAY_IMPORT = {
    "core": set(),
    "tables": {"core"},
    "accounting": {"core"},
    "mechanisms": {"core"},
    "engines": {"core", "tables"},
    "statistics": {"core", "mechanisms", "tables", "engines"},
    "sampling": {"core"},
    "gradients": {"core"},
    "noise": {"core", "mechanisms"},
    "plan": {"core", "accounting", "sampling", "gradients", "noise"},
    "models": {"core"},
    "isolation": {"core", "sampling", "gradients", "plan"},
    "data": {"core", "isolation", "tables"},
    "audit": {"core"},
    "report": {"core", "accounting", "plan", "audit"},
    "runs": {"core", "accounting", "tables", "engines", "report"},
    "queries": {"core", "accounting", "tables", "engines", "mechanisms", "statistics"}
    | {"report", "runs"},
    "text": {"core", "accounting", "mechanisms", "tables", "report", "runs"},
    "testing": BELOW_PLAN | {"audit", "report", "runs"},
    "labels": {
        "core",
        "accounting",
        "mechanisms",
        "models",
        "data",
        "tables",
        "report",
        "runs",
        "training",
    },
    "local": {"core", "accounting", "mechanisms", "report", "runs"},
    "estimators": {
        "engines",
        "core",
        "accounting",
        "data",
        "tables",
        "mechanisms",
        "statistics",
        "report",
        "runs",
    },
    "prediction": {
        "core",
        "accounting",
        "mechanisms",
        "models",
        "data",
        "tables",
        "audit",
        "report",
        "runs",
    }
    | {"training", "federated", "labels"},
    "training": BELOW_PLAN
    | {
        "plan",
        "isolation",
        "models",
        "data",
        "tables",
        "report",
        "runs",
        "queries",
        "statistics",
    },
    "federated": BELOW_PLAN
    | {"plan", "models", "isolation", "data", "report", "runs", "training", "audit"},
    "tuning": BELOW_PLAN | {"plan", "models", "data", "estimators", "report", "runs", "training"},
    "synthetic": BELOW_PLAN
    | {"engines", "plan", "models", "data", "tables", "report", "runs", "text", "training"}
    | {"prediction", "audit"},
    "integrations": ABOVE_PLAN | {"federated", "tuning"},
    "cli": ABOVE_PLAN
    | {
        "federated",
        "local",
        "estimators",
        "tuning",
        "synthetic",
        "text",
        "prediction",
        "labels",
    },
}
"""DESIGN's table; that training imports report is explained in docs/decisions.md."""

OF_TRAINING = {"observation", "job", "shadows", "user_training"}
"""The modules of audit that run training. They alone may import it, and of the folders that it
imports none may import them.
"""
MAY_IMPORT_OF_TRAINING = BELOW_PLAN | {"plan", "models", "data", "runs", "training"}
MAY_AUDIT_TRAINING = {"audit", "federated", "cli", "studies"}


def imports(file: Path) -> set[tuple[str, str]]:
    """(folder, module) of every dpfy import in a file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = (
                [f"{node.module}.{a.name}" for a in node.names]
                if node.module == "dpfy"
                else [node.module]
            )
            if node.module.count(".") == 1:
                names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {(n.split(".")[1], n) for n in names if n.startswith("dpfy.")}
    return found


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT)


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(file):
    folder = file.relative_to(ROOT).parts[0]
    assert folder in MAY_IMPORT, f"{folder} is not in the table"
    observes = folder == "audit" and file.stem in OF_TRAINING
    allowed = MAY_IMPORT_OF_TRAINING if observes else MAY_IMPORT[folder]
    for imported, module in imports(file):
        if imported == "audit" and set(module.split(".")[2:3]) & OF_TRAINING:
            assert folder in MAY_AUDIT_TRAINING, f"{folder} must not import {module}"
        if imported == folder or imported == "__version__":
            continue
        assert imported in allowed, f"{folder} must not import {module}"
        if folder == "plan" and imported == "gradients":
            assert module.startswith("dpfy.gradients.clip"), (
                "plan reads only the clip from gradients"
            )


LIGHT = [
    "dpfy",
    "dpfy.core.ledger",
    "dpfy.accounting",
    "dpfy.plan.recipe",
    "dpfy.cli.app",
    "dpfy.sampling.samplers",
    "dpfy.mechanisms",
]
HEAVY = ("torch", "dp_accounting", "matplotlib", "pandas")


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_at_import(module):
    code = f"import sys, {module}; sys.exit(', '.join(m for m in {HEAVY} if m in sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True
        ).stderr.strip()
        == ""
    )


LAB = ROOT.parent / "lab" / "dpfy_lab"


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dpfy_never_names_the_lab(file):
    """The lab is found through entry points alone: dpfy works where it is not installed."""
    names = [
        name
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert [name for name in names if name.split(".")[0] == LAB.name] == []
