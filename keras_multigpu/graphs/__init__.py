"""A model as a graph of layer calls: reading it, what its calls cost, where to cut it."""
