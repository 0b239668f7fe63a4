"""Profile + budget -> Plan. Pure Python: no streams, no device, no clock."""

from flextensor.planner.build import build_plan
from flextensor.planner.plan import ALIGNMENT, HOST, BudgetError, Copy, Plan, Prediction, align
from flextensor.planner.search import search
from flextensor.planner.simulate import CopySpan, Simulation, VisitSpan, predict, simulate
from flextensor.planner.verify import PlanError, verify_plan

__all__ = [
    "ALIGNMENT",
    "HOST",
    "BudgetError",
    "Copy",
    "CopySpan",
    "Plan",
    "PlanError",
    "Prediction",
    "Simulation",
    "VisitSpan",
    "align",
    "build_plan",
    "predict",
    "search",
    "simulate",
    "verify_plan",
]
