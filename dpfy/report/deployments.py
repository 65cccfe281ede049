"""Published deployments, to set an epsilon beside. Each has its own unit, adjacency and trust: a
smaller number alone is no ranking.
"""

from __future__ import annotations

from typing import Any

UNSTATED = "not stated"
NOTE = "An epsilon can be compared with another only where unit, adjacency and trust are the same."
ROWS: tuple[dict[str, str], ...] = (
    {
        "who": "US Census Bureau 2022",
        "what": "demonstration data",
        "epsilon": "12.2",
        "unit": "person",
        "adjacency": UNSTATED,
    },
    {
        "who": "Google Gboard 2022",
        "what": "Spanish-language next-word prediction",
        "epsilon": "8.9 (rho 0.81)",
        "unit": "device",
        "adjacency": "zero-out",
    },
    {
        "who": "Apple 2016-2022",
        "what": "various data of end users running iOS or macOS",
        "epsilon": "2 to 16",
        "unit": "user and day",
        "adjacency": "add-or-remove-one",
    },
    {
        "who": "Microsoft 2021",
        "what": "mentioned; no specific production use is described",
        "epsilon": "4",
        "unit": "user in six months",
        "adjacency": UNSTATED,
    },
    {
        "who": "Facebook 2022",
        "what": "mobility changes of users",
        "epsilon": "2",
        "unit": "user and day",
        "adjacency": UNSTATED,
    },
)
"""As the guide tells them (Ponomareva et al. 2023, section 5.2.2): its words, and the years of its
sources.
"""


def table() -> dict[str, Any]:
    """For the card."""
    return {"words": NOTE, "rows": [dict(row) for row in ROWS]}
