"""One suite over every engine: the answer is fixed by the clip rule, an engine changes only speed
and memory.
"""

from __future__ import annotations

import pytest

from dpfy.core.errors import InvalidInput
from dpfy.gradients.engines.choice import ENGINES, choose
from dpfy.testing import check_engine
from dpfy.testing.engines import suite_models


@pytest.mark.parametrize("name", sorted(ENGINES))
@pytest.mark.parametrize("seed", [0, 1])
def test_every_engine_keeps_the_contract(name: str, seed: int) -> None:
    check_engine(ENGINES[name], seed=seed, thorough=seed == 0)


def test_choice_is_automatic_said_and_overridable() -> None:
    model = next(suite_models(0)).make()
    picked, why = choose(model)
    assert picked.name == "bookkeeping"
    assert "bookkeeping" in why
    assert "\n" not in why
    for name in ENGINES:
        assert choose(model, name)[0].name == name
    with pytest.raises(InvalidInput, match="bookkeeping"):
        choose(model, "bookeeping")
