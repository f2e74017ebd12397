"""Spreads the traced step of one device over several.

A step's way: `step.py` traces it once; `planner.py` decides, operation by operation, how each
tensor lies on the devices (`layouts.py`), by the operation's rule (`rules/`), on sizes that are
polynomials in the batch size (`sizes.py`, `constants.py`). The result is a `Program`: what each
device computes, what one device computes, and what crosses between them (`crossings.py`).
`emission.py` writes the program into a graph, each region of it as one function for all devices.
"""
