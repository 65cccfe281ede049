"""Trees and boosting: additive functions, boosted trees, forests, a tree grown from the top."""

from dpfy.estimators.trees.additive import AdditiveBoostingClassifier, AdditiveBoostingRegressor
from dpfy.estimators.trees.boosted import GradientBoostingClassifier, GradientBoostingRegressor
from dpfy.estimators.trees.forest import RandomForestClassifier, RandomForestRegressor
from dpfy.estimators.trees.top_down import DecisionTreeClassifier, DecisionTreeRegressor

__all__ = [
    "AdditiveBoostingClassifier",
    "AdditiveBoostingRegressor",
    "DecisionTreeClassifier",
    "DecisionTreeRegressor",
    "GradientBoostingClassifier",
    "GradientBoostingRegressor",
    "RandomForestClassifier",
    "RandomForestRegressor",
]
