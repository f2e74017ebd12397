"""Attacks live processes of a cluster: what they do, and whether they are usable afterwards.

    PYTHONPATH=.:tests KERAS_BACKEND=tensorflow python -m support.cluster_attacks --times 10

prints the table that docs/cluster.md shows. It takes half an hour on two cores.
"""
