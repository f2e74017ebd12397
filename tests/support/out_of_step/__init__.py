"""Ways in which one of several joined processes falls out of step, and what all of them say.

    PYTHONPATH=.:tests KERAS_BACKEND=jax python -m support.out_of_step --counts 2 3

tries all of them, and prints a table. It takes half an hour on two cores.
"""
