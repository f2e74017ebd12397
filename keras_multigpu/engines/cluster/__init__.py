"""Other machines: what the engines share of processes that compute together, and of addresses."""
