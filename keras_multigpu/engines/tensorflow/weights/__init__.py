"""Where the weights are stored and updated, and how they reach the replicas."""
