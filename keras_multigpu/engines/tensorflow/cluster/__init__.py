"""Devices of other machines, driven by this process through TensorFlow's own runtime."""
