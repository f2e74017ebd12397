"""Drives the devices of other machines through TensorFlow's runtime."""
