"""Several processes, one per host, that train one model together."""
