"""Names of a package that are found when first used, so that importing the package costs nothing:
neither plans nor verification pay for torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package (PEP 562).

    Args:
        package: The name of the package.
        homes: The names that it exports, separated by spaces, by the module that defines them.

    Returns:
        A function that imports the home of a name and returns what it defines there, and one that
        lists `__all__` of the package.
    """
    home = {name: module for module, listed in homes.items() for name in listed.split()}

    def getattr_(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    def dir_() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return getattr_, dir_
