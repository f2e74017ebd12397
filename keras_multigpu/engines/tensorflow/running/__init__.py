"""Calls a traced template on every device, and takes the gradients there."""
