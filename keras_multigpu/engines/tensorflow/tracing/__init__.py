"""The template as a traced function of its state, which can be called on every device."""
