"""Lower bounds on epsilon measured from outside: estimators, attacks, deterministic checks, and the
bugs they must catch.
"""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """The package, which is called as a function: ``dpfy.audit("runs/x")``."""

    def __call__(self, run: str, *, confidence: float = 0.95) -> dict[str, Any]:
        """Audit a finished run by its canaries, and leave audit.json and audit.svg in its folder.

        Args:
            run: A finished run that was trained with canaries (``dpfy audit train``).
            confidence: Of the lower bound on epsilon.

        Returns:
            What was found: "sentence" says it in words, "violated" whether the claim is refuted.
        """
        from pathlib import Path

        from dpfy.audit.job import audited_run

        return audited_run(Path(run), confidence)[0]


sys.modules[__name__].__class__ = CallablePackage
