"""Comparisons of keras_multigpu with its peers: every figure that is quoted is printed here."""
