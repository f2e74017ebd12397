"""Joined processes against one device, on every model of the parity table.

    PYTHONPATH=.:tests python -m support.joined_table --layouts 1,1 2,2 1,1,1 2,2,2

A layout is the number of devices of each process.
"""
