"""The reference models, each in a module of its own."""
