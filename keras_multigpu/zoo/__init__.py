"""The reference models."""
