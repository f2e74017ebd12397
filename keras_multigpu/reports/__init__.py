"""Reports: is it worth using several devices, and what do they cost each other."""

from keras_multigpu.reports.report import Column, Report

__all__ = ["Column", "Report"]
