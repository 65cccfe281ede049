"""The classic mistakes of private training, as replacements of parts. None of them can be reached
from production code.
"""

from __future__ import annotations

from dpfy.audit.bench import Bug
from dpfy.audit.bugs import (
    answers,
    claims,
    clients,
    clipping,
    clusters,
    evolutions,
    labels,
    linear,
    local,
    noise,
    owners,
    pictures,
    sampling,
    searches,
    shares,
    tables,
    trees,
    users,
)

PEOPLE: tuple[Bug, ...] = (
    *owners.BUGS,
    *clients.BUGS,
    *users.BUGS,
    *local.BUGS,
    *labels.BUGS,
    *answers.BUGS,
)
SYNTHETIC: tuple[Bug, ...] = (*tables.BUGS, *pictures.BUGS, *evolutions.BUGS)
LEARNERS: tuple[Bug, ...] = (*linear.BUGS, *trees.BUGS, *clusters.BUGS)
BUGS: tuple[Bug, ...] = (
    *noise.BUGS,
    *clipping.BUGS,
    *sampling.BUGS,
    *claims.BUGS,
    *shares.BUGS,
    *PEOPLE,
    *SYNTHETIC,
    *LEARNERS,
    *searches.BUGS,
)
"""All of them, in the order of the pipeline."""
