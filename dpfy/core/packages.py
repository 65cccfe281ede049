"""Packages that not every installation has: what is missing, and the one command that installs
it.
"""

from __future__ import annotations

from dpfy.core.errors import Unsupported

EXTRAS = {
    "pyarrow": "data",
    "pandas": "data",
    "transformers": "text",
    "peft": "text",
    "accelerate": "text",
    "datasets": "text",
    "lightning": "lightning",
    "flwr": "flower",
    "starlette": "serve",
    "uvicorn": "serve",
    "optuna": "optuna",
    "ray": "ray",
    "mkdocs": "docs",
}
"""Import name to the extra of dpfy that brings it; what is not here comes with dpfy itself, or
under its own name.
"""
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "dp_accounting": "dp-accounting",
    "google.protobuf": "protobuf",
    "dpfy_lab": "dpfy-lab",
}
"""Import name to the name that pip knows, where they differ."""


def way_out(module: str) -> str:
    """How to install what `import module` wants."""
    top = module.partition(".")[0]
    if top in EXTRAS:
        return f'install it: pip install "dpfy[{EXTRAS[top]}]"'
    return f"install it: pip install {DISTRIBUTIONS.get(top, top)}"


def missing(what: str, module: str) -> Unsupported:
    """The refusal of `what`, which needs a package that is not installed."""
    top = module.partition(".")[0]
    return Unsupported(f"{what} without the package {DISTRIBUTIONS.get(top, top)}", way_out(module))
