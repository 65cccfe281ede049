"""dpfy: differentially private machine learning, from the first look at the data to the sentence
under the released model.

    people = dpfy.Dataset("people.csv", schema="people.toml", ledger="people.jsonl",
                          budget=dpfy.Budget(8, 1e-6))
    answers = dpfy.query(people, "mean(age), count() by job", epsilon=0.5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

__version__ = "0.3.0"

# The one list of public names: type checkers read it as it is, and `_exported_names` makes
# `__all__` of it and imports a name when it is first used. Names of the levels below are those of
# their families: `dpfy.training`, `dpfy.plan`, `dpfy.models`, `dpfy.gradients`, ....
if TYPE_CHECKING:
    from dpfy import audit as audit
    from dpfy.core.errors import BudgetExceeded as BudgetExceeded
    from dpfy.core.errors import DpfyError as DpfyError
    from dpfy.core.errors import InvalidInput as InvalidInput
    from dpfy.core.errors import Unsupported as Unsupported
    from dpfy.core.ledger import Ledger as Ledger
    from dpfy.core.unit import Adjacency as Adjacency
    from dpfy.core.unit import Person as Person
    from dpfy.core.unit import Unit as Unit
    from dpfy.data.given import lazy as lazy
    from dpfy.data.owners import Users as Users
    from dpfy.data.users import by_user as by_user
    from dpfy.gradients.engine import per_user as per_user
    from dpfy.gradients.layers.registered import register_layer as register_layer
    from dpfy.gradients.model_report import inspect as inspect
    from dpfy.integrations.opacus import from_opacus as from_opacus
    from dpfy.models.repair import repair as repair
    from dpfy.plan.auto import auto as auto
    from dpfy.plan.recipe import Plan as Plan
    from dpfy.plan.recipe import Recipe as Recipe
    from dpfy.plan.recipe import dpsgd as dpsgd
    from dpfy.prediction.session import serve as serve
    from dpfy.queries.run import query as query
    from dpfy.report.verify import verify as verify
    from dpfy.runs.dataset import Budget as Budget
    from dpfy.runs.dataset import Dataset as Dataset
    from dpfy.runs.released import Released as Released
    from dpfy.runs.released import load as load
    from dpfy.runs.released import predict as predict
    from dpfy.runs.released import sign as sign
    from dpfy.runs.run import Run as Run
    from dpfy.synthetic.evolution import evolve as evolve
    from dpfy.synthetic.run import synthesize as synthesize
    from dpfy.tables.columns import Category as Category
    from dpfy.tables.columns import Date as Date
    from dpfy.tables.columns import Label as Label
    from dpfy.tables.columns import Number as Number
    from dpfy.tables.columns import Text as Text
    from dpfy.tables.schema import Schema as Schema
    from dpfy.text.corpus import Texts as Texts
    from dpfy.training.evaluation import PrivateTest as PrivateTest
    from dpfy.training.evaluation import PublicTest as PublicTest
    from dpfy.training.evaluation import WithheldTest as WithheldTest
    from dpfy.training.fit import fit as fit
    from dpfy.training.loop import PrivateTraining as PrivateTraining
    from dpfy.training.per_record import per_record as per_record
    from dpfy.training.runtime import Runtime as Runtime
    from dpfy.tuning.fits import tune as tune

__all__, __getattr__, __dir__ = _exported_names(__name__)
