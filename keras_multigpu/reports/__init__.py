"""Reports: are several devices worth it, and what crosses between them?"""

from keras_multigpu.reports.advice import advise
from keras_multigpu.reports.advice_report import Advice
from keras_multigpu.reports.interconnect import PRESETS, Link, measure_link
from keras_multigpu.reports.memory_report import MemoryReport, memory
from keras_multigpu.reports.placement import plot_placement
from keras_multigpu.reports.plan_report import Choice, PlanReport
from keras_multigpu.reports.planning import plan
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.scaling_report import Run, ScalingReport
from keras_multigpu.reports.trainings import scaling
from keras_multigpu.reports.transfers_report import TransfersReport, transfers
from keras_multigpu.reports.workload import Cut

__all__ = [
    "PRESETS",
    "Advice",
    "Choice",
    "Column",
    "Cut",
    "Link",
    "MemoryReport",
    "PlanReport",
    "Report",
    "Run",
    "ScalingReport",
    "TransfersReport",
    "advise",
    "measure_link",
    "memory",
    "plan",
    "plot_placement",
    "scaling",
    "transfers",
]


def __dir__() -> list[str]:
    return sorted(__all__)
