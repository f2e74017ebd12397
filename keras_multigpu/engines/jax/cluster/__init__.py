"""Several processes, each with the devices of its host, that train one model together."""
