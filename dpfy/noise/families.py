"""The strategies by name, for plans in JSON."""

from __future__ import annotations

from dpfy.noise.banded import Banded, NormalisedBanded
from dpfy.noise.blt import Blt
from dpfy.noise.dense import Dense
from dpfy.noise.inverse import InverseBanded
from dpfy.noise.schedule import Schedule
from dpfy.noise.shares import Shares
from dpfy.noise.strategy import Identity
from dpfy.noise.toeplitz import SquareRoot
from dpfy.noise.tree import Tree

STRATEGIES: dict[str, type] = {
    "identity": Identity,
    "schedule": Schedule,
    "shares": Shares,
    "banded": Banded,
    "normalised-banded": NormalisedBanded,
    "inverse-banded": InverseBanded,
    "blt": Blt,
    "square-root": SquareRoot,
    "dense": Dense,
    "tree": Tree,
}
