"""The solvers of linear models by their names: values of one parameter."""

from __future__ import annotations

from dpfy.estimators.linear.bolt_on import BoltOn
from dpfy.estimators.linear.descent import GradientDescent
from dpfy.estimators.linear.minima import ObjectivePerturbation, OutputPerturbation
from dpfy.estimators.linear.newton import Newton
from dpfy.estimators.linear.quadratic import Functional, Quadratic
from dpfy.estimators.linear.solver import Solver

SOLVERS: dict[str, Solver] = {
    "gradient": GradientDescent(),
    "newton": Newton(),
    "objective": ObjectivePerturbation("objective", tolerance=1e-5, share=0.002),
    "approximate-minima": ObjectivePerturbation("approximate-minima", tolerance=0.05, share=0.05),
    "output": OutputPerturbation(),
    "bolt-on": BoltOn(),
    "functional": Functional(),
    "statistics": Quadratic(),
}
