"""Entry points: which classes and commands belong to a name, in dpfy and in installed plug-ins.

A distribution adds to dpfy by an entry point in its `pyproject.toml`. What dpfy adds to itself is
in `dpfy/entry_points.txt`, from which its own metadata is made too. That file is read from the
package, so that it always fits the code beside it, also in a source tree that nobody installed.

Names of a package that are found when first used, so that importing the package costs nothing:
neither plans nor verification pay for torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

from dpfy.core import check
from dpfy.core.errors import Unsupported, missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.metadata import EntryPoint
import sys
from collections.abc import Callable, Mapping

CLAIMS = "dpfy.claims"
"""Kinds of releases: the name is the kind, the object its class (`dpfy.core.claim.Claim`)."""
COMMANDS = "dpfy.commands"
"""Verbs of the command line: `verb`, or `group.verb`; the object is a function for Typer or a
`typer.Typer`.
"""
SYNTHESIZERS = "dpfy.synthesizers"
"""Methods of `dpfy synthesize`: the object is a `dpfy.synthetic.methods.SynthesisMethod`, which
measures marginals; or it makes the run folder of a synthetic table. Its arguments are then the
data, the domain, the terms, the options, the place of the run, the public table if any, and a
function that shows progress.
"""
VOTE_RULES = "dpfy.vote_rules"
"""Rules that make an answer of votes: the object is a subclass of `dpfy.prediction.rules.Rule`."""
ESTIMATORS = "dpfy.estimators"
"""Estimators by the names of their classes (`dpfy.estimators.estimator.PrivateEstimator`)."""
SOLVERS = "dpfy.solvers"
"""Solvers of linear models (`solver=`): the object is a `dpfy.estimators.linear.solver.Solver`."""
CLUSTER_STARTS = "dpfy.cluster_starts"
"""How k-means begins (`method=`): a `dpfy.estimators.clusters.kmeans.ClusterStart`."""
LABEL_METHODS = "dpfy.label_methods"
"""Releases of labels (`method=`): a function from a `dpfy.labels.learning.LabelSetup` and what asks
the labels to a model.
"""
OWN = "entry_points.txt"


def find(group: str, name: str) -> Any:
    """The object that the entry point `name` of `group` refers to; None where there is none.

    Args:
        group: One of the groups above.
        name: The whole name. It may come from a file that nobody trusts.

    Returns:
        The object, imported by this call.

    Raises:
        Unsupported: The plug-in cannot be imported, or two of them have this name.

    Guarantees:
        Nothing is imported but what an installed distribution registered under exactly this name.
        A name of dpfy itself means the same whatever is installed.
    """
    if (target := own(group).get(name)) is not None:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    points = _installed(group).get(name, ())
    if not points:
        return None
    if len(points) > 1:
        homes = " and ".join(sorted(map(origin, points)))
        raise Unsupported(f"{name!r} of {group}, which {homes} both add", "uninstall all but one")
    try:
        return points[0].load()
    except Exception as problem:
        raise Unsupported(
            f"{name!r} of {group}, which {origin(points[0])} adds, cannot be imported "
            f"({type(problem).__name__}: {problem}) and",
            "repair or uninstall it",
        ) from problem


def choose(
    group: str, field: str, name: Any, own: Mapping[str, Any], lab: Sequence[str] = ()
) -> Any:
    """The member of a family that a user names in `field`: one of dpfy's `own`, or a plug-in's.

    Args:
        group: The entry points that add to the family.
        field: The name of the setting, for errors.
        name: The member.
        own: What dpfy has itself, by name.
        lab: The members of the distribution dpfy-lab.

    Raises:
        InvalidInput: There is none of that name; the known ones are listed.
        Unsupported: It is one of dpfy-lab, which is not installed.
    """
    if isinstance(name, str) and name in own:
        return own[name]
    added = installed(group)
    if name in lab and name not in added:
        raise missing(f"{field}={name!r}", "dpfy_lab")
    return find(group, check.one_of(field, name, (*own, *added)))


@cache
def own(group: str) -> dict[str, str]:
    """What dpfy registers itself in `group`: names, each with `module:attribute`."""
    found: dict[str, str] = {}
    inside = False
    for line in (pkgutil.get_data("dpfy", OWN) or b"").decode().splitlines():
        if line.startswith("["):
            inside = line.strip() == f"[{group}]"
        elif inside and "=" in line:
            name, _, target = line.partition("=")
            found[name.strip()] = target.strip()
    return found


def installed(group: str) -> dict[str, str]:
    """The names that plug-ins add to `group`, each with the distribution that adds it. Imports no
    plug-in.
    """
    return {name: origin(points[0]) for name, points in sorted(_installed(group).items())}


def origin(point: EntryPoint) -> str:
    """The name of the distribution that an entry point comes from."""
    return point.dist.name if point.dist is not None else "an unnamed distribution"


@cache
def _installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of all distributions but dpfy, by name."""
    from importlib.metadata import entry_points  # not free: only for who asks for plug-ins

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        if origin(point) != "dpfy":
            found[point.name] = (*found.get(point.name, ()), point)
    return found


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


EXPORT = "    from "
"""How a line begins that exports a name."""


def exported_names(
    package: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, from what its `__init__.py` imports for
    type checkers.

    Args:
        package: The name of the package, which is being imported.

    Returns:
        The three, in this order. A name that is not there, but in the table of hints
        `hints.txt` of the package (if it has one), is an `AttributeError` that names the right
        call.
    """
    text = (pkgutil.get_data(package, "__init__.py") or b"").decode()
    lines = [row.split() for row in text.splitlines() if row.startswith(EXPORT)]
    home = {words[3]: words[1] for words in lines}
    public = sorted(home)

    def getattr_(name: str) -> Any:
        if home.get(name) == package:
            return importlib.import_module(f"{package}.{name}")
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        known = f"module {package!r} has no attribute {name!r}"
        told = hints(package).get(name)
        raise AttributeError(f"{known}: {told}" if told else known)

    return public, getattr_, lambda: public


def hints(package: str) -> dict[str, str]:
    """For names that a newcomer guesses, the right call: lines `name: what to write`."""
    try:
        lines = (pkgutil.get_data(package, "hints.txt") or b"").decode().splitlines()
    except OSError:  # a package without the file
        return {}
    return dict(line.split(": ", 1) for line in lines if ": " in line)
