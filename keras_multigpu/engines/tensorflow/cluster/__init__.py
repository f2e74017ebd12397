"""Devices of other machines, which this process drives through TensorFlow's runtime."""
