"""Weights and slots that are spread over the devices, or stacked."""
