"""Replaces names of dpfy while a block runs, and puts back what was there."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PRODUCT = (
    "dpfy",
    "dpfy_lab.data_dependent",
    "dpfy_lab.microbatches",
    "dpfy_lab.estimators",
    "dpfy_lab.gans",
    "dpfy_lab.metric_text",
    "dpfy_lab.synthetic_images",
    "dpfy_lab.table_methods",
    "dpfy_lab.vote_rules",
)
"""Packages in which names are replaced: dpfy, and the methods of the lab. The checks of the lab keep
what they imported.
"""


class NoSuchTarget(Exception):
    """A seeded mistake replaces a name that dpfy does not have."""


def resolve(target: str) -> tuple[Any, str, Any]:
    """Find a dotted name of dpfy.

    Args:
        target: A module of dpfy, then classes, then the name to replace.

    Returns:
        The module or class that defines the name, the name, and its value as it is stored there.

    Raises:
        NoSuchTarget: There is no such name, or a class only inherits it.
    """
    path = target.split(".")
    for length in range(len(path) - 1, 0, -1):
        home = ".".join(path[:length])
        try:
            owner: Any = importlib.import_module(home)
        except ModuleNotFoundError as missing:
            if missing.name is None or not home.startswith(missing.name):
                raise
            continue
        for part in path[length:-1]:
            owner = getattr(owner, "__dict__", {}).get(part)
        if not _of_product(target) or path[-1] not in getattr(owner, "__dict__", {}):
            break
        return owner, path[-1], vars(owner)[path[-1]]
    raise NoSuchTarget(f"{target}: dpfy has no such name")


class Patch:
    """Replacements that are in place. :func:`patching` makes one and undoes it.

    A function or class that is named where it is defined is replaced in every module of dpfy that
    imported it. Named in another module, it is replaced in that module alone.
    """

    def __init__(self) -> None:
        self.targets: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def __call__(self, target: str, replacement: Any) -> None:
        """Put `replacement` in the place of `target`.

        Raises:
            NoSuchTarget: `target` does not exist.
        """
        owner, name, real = resolve(target)
        homes = [(owner, name)]
        if isinstance(owner, ModuleType) and getattr(real, "__module__", "") == owner.__name__:
            homes += [home for home in _names_of(real) if home != (owner, name)]
        self.targets.append(target)
        self._undo.append(functools.partial(_restore, homes, real, replacement))
        for home, alias in homes:
            setattr(home, alias, replacement)

    def around(self, target: str, function: Callable[..., Any]) -> None:
        """Put `function` in the place of `target`. It is given the real one, then the arguments."""
        self(target, _bound(function, resolve(target)[2]))

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


@contextmanager
def patching() -> Iterator[Patch]:
    """A block whose replacements are undone at its end, also when it raises."""
    patch = Patch()
    try:
        yield patch
    finally:
        patch.undo()


def _bound(function: Callable[..., Any], real: Any) -> Any:
    """`function` with the real one as its first argument, of the same kind as the real one."""
    if isinstance(real, property):
        return property(lambda self: function(real.fget, self))
    if isinstance(real, staticmethod | classmethod):
        return type(real)(_bound(function, real.__func__))
    if not callable(real):
        raise TypeError(f"{real!r} is not a function: call patch(target, value)")

    def replacement(*given: Any, **named: Any) -> Any:
        return function(real, *given, **named)

    return functools.update_wrapper(replacement, real) if inspect.isfunction(real) else replacement


def _of_product(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in PRODUCT)


def _names_of(value: Any) -> list[tuple[ModuleType, str]]:
    """Where modules of dpfy hold `value`."""
    modules = [m for n, m in list(sys.modules.items()) if _of_product(n) and m]
    return [(m, n) for m in modules for n, held in list(vars(m).items()) if held is value]


def _restore(homes: list[tuple[Any, str]], real: Any, replacement: Any) -> None:
    for home, name in homes:
        setattr(home, name, real)
    # A module that was first imported in the block took the replacement for the real one.
    for module, name in _names_of(replacement) if callable(replacement) else ():
        setattr(module, name, real)
