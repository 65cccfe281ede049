"""The solvers of linear models by their names: values of one parameter."""

from __future__ import annotations

from dpfy.estimators.linear.bolt_on import BoltOnSolver
from dpfy.estimators.linear.descent import GradientDescentSolver
from dpfy.estimators.linear.minima import ObjectivePerturbationSolver, OutputPerturbationSolver
from dpfy.estimators.linear.newton import NewtonSolver
from dpfy.estimators.linear.quadratic import FunctionalSolver, SecondMomentSolver
from dpfy.estimators.linear.solver import Solver

SOLVERS: dict[str, Solver] = {
    "gradient": GradientDescentSolver(),
    "newton": NewtonSolver(),
    "objective": ObjectivePerturbationSolver("objective", tolerance=1e-5, share=0.002),
    "approximate-minima": ObjectivePerturbationSolver(
        "approximate-minima", tolerance=0.05, share=0.05
    ),
    "output": OutputPerturbationSolver(),
    "bolt-on": BoltOnSolver(),
    "functional": FunctionalSolver(),
    "statistics": SecondMomentSolver(),
}
