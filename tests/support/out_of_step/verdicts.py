"""What came of a way."""

import re

from support.out_of_step.ways import WAYS


def judge(way, odd, texts):
    """What the processes have printed, in a word.

    `right`: all name the odd process, and what it did; `other`: all name another one, and say in
    what they differ; `split`: they name different ones; `bad`: they say something else; `silent`:
    one says nothing.
    """
    _, expected, own, _ = WAYS[way]
    ends = [re.findall(r"^ends with (.*)$", text, re.MULTILINE) for text in texts]
    if expected is None:
        return "right" if all(end == ["nothing"] for end in ends) else "bad"
    outcomes = set()
    for number, end in enumerate(ends):
        if number == odd and own is not None and (own == "-" or _is_own(own, end)):
            continue
        outcomes.add(_word(end[-1] if end else "nothing", odd, expected))
    if outcomes <= {"right", "other"} and len(outcomes) == 2:
        return "split"
    return min(outcomes - {"right"}, default="right")


def _is_own(own, end):
    return bool(end) and re.match(own or "nothing", end[-1]) is not None


def _word(text, odd, expected):
    if text == "nothing":
        return "silent"
    named = re.match(r"ClusterError: .* \(process (\d+), pid \d+\): (.*)", text)
    if named is None:
        return "bad"
    if int(named[1]) != odd:
        return "other"
    return "right" if re.match(expected, named[2]) else "bad"


def brief(text):
    """The last word of a process, without its cure."""
    end = (re.findall(r"^ends with (.*)$", text, re.MULTILINE) or ["-"])[-1]
    return re.sub(r"(?<=ClusterError: )\S+ |, pid \d+", "", end)[:190].replace("|", "/")
