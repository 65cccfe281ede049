"""Everything that the self-test of the audit examines, in one bench: training, federations and
searches.
"""

from __future__ import annotations

from dpfy.federated.bench import FederatedBench
from dpfy.tuning.bench import TuningBench


class WholeBench(FederatedBench, TuningBench):
    """The benches of all packages."""
