"""Reports: is it worth using several devices, and what do they cost each other."""

from keras_multigpu.reports.advice import advise
from keras_multigpu.reports.advice_report import Advice
from keras_multigpu.reports.links import PRESETS, Link, measure_link
from keras_multigpu.reports.placement_plot import plot_placement
from keras_multigpu.reports.report import Column, Report
from keras_multigpu.reports.runs import Run
from keras_multigpu.reports.scaling_report import ScalingReport
from keras_multigpu.reports.scaling_runs import scaling
from keras_multigpu.reports.transfers import transfers
from keras_multigpu.reports.transfers_report import TransfersReport
from keras_multigpu.reports.workload import Cut

__all__ = [
    "PRESETS",
    "Advice",
    "Column",
    "Cut",
    "Link",
    "Report",
    "Run",
    "ScalingReport",
    "TransfersReport",
    "advise",
    "measure_link",
    "plot_placement",
    "scaling",
    "transfers",
]
