"""Finds out, on made-up rows, whether a batch can be sliced and how results are merged."""
