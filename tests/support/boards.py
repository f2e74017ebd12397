"""Boards of groups of processes, without processes."""


class Told:
    """A board on which others have written already."""

    def __init__(self, **others):
        self.entries = {key.replace("__", "/"): value for key, value in others.items()}
        self.silences = {}

    def write(self, key, value):
        self.entries[key] = value

    def read(self, prefix, seconds=0.0):
        return {k.removeprefix(prefix): v for k, v in self.entries.items() if k.startswith(prefix)}

    def silence(self, number):
        return self.silences.get(number, 0.0)

    def stop(self, seconds):
        self.entries["stopped"] = "yes"
