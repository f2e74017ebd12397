"""Comparisons of keras_multigpu with its peers; they print every figure that the pages quote."""
