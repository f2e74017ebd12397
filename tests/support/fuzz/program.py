"""A case as Python text."""

from __future__ import annotations

import inspect
import re

from . import extra
from .case import Case, Head, Part


def definitions(case: Case) -> str:
    """The case's data, `build` and `use`: everything but the comparison."""
    body = [
        *_data(case),
        "",
        *_trials(case),
        *(_SUBCLASSED if case.wiring == "subclassed" else _BUILDERS[case.wiring])(case),
        "",
        *_use(case),
    ]
    text = "\n".join(body)
    return _own_classes(text) + text + "\n"


def _data(case: Case) -> list[str]:
    inputs, targets = ([s.data for s in case.sources], [head.target for head in case.heads])
    return [
        f"rng, rows = np.random.default_rng({case.seed}), {case.rows}",
        f"X = {_pack(case.inputs, inputs, 'i')}",
        f"Y = {_pack(case.outputs, targets, 'y')}",
        "W = rng.uniform(0.1, 2.0, size=rows)",
    ]


def _trials(case: Case) -> list[str]:
    """A function for each trial's data."""
    lines = []
    for number in range(len(case.trials)):
        given = _function([*_data(case.fresh(number)), "return {'X': X, 'Y': Y, 'W': W}"])
        lines += [given[0].replace("build", f"data_{number}"), *given[1:], ""]
    names = ", ".join(f"data_{number}" for number in range(len(case.trials)))
    return [*lines, f"TRIALS = [{names}]", ""] if lines else []


def _own_classes(text: str) -> str:
    """The source of the classes of `extra` that a text uses."""
    found, todo = [], [text]
    while todo:
        part = todo.pop()
        for name in extra.NAMES:
            if re.search(rf"\b{name}\(", part) and name not in found:
                found.append(name)
                todo.append(inspect.getsource(getattr(extra, name)))
    in_order = [name for name in extra.NAMES if name in found]
    return "".join(inspect.getsource(getattr(extra, name)) + "\n\n" for name in in_order)


def _pack(how: str, texts: list[str], letter: str) -> str:
    if how == "single":
        return texts[0]
    if how == "list":
        return f"[{', '.join(texts)}]"
    return "{" + ", ".join(f"'{letter}{k}': {text}" for k, text in enumerate(texts)) + "}"


def _symbols(case: Case) -> str:
    texts = []
    for number, source in enumerate(case.sources):
        name = f", name='i{number}')"
        texts.append(source.symbol[:-1] + name if case.inputs == "dict" else source.symbol)
    return _pack(case.inputs, texts, "i")


def _statements(part: Part, result: str, prefix: str, number: int) -> list[str]:
    """A part in a graph: layers that are called twice, or frozen, get a name."""
    lines, calls = [], []
    for index, make in enumerate(part.makes):
        if part.form.count("{%d}" % index) > 1 or (part.frozen and index == 0):  # noqa: UP031
            name = f"{prefix}{number}{'abc'[index]}"
            lines.append(f"{name} = {make}")
            if part.frozen and index == 0:
                lines.append(f"{name}.trainable = False")
            calls.append(name)
        else:
            calls.append(str(make))
    return [*lines, f"{result} = {part.form.format(*calls)}"]


def _chain(parts: tuple[Part, ...], prefix: str) -> list[str]:
    return [line for k, part in enumerate(parts) for line in _statements(part, "x", prefix, k)]


def _ends(case: Case) -> list[str]:
    """The heads, each from the trunk's `x`."""
    lines = ["trunk = x"] if len(case.heads) > 1 else []
    for number, head in enumerate(case.heads):
        lines += ["x = trunk"] if number else []
        lines += [*_chain(head.parts, f"h{number}_"), f"y{number} = x"]
    return lines


def _results(case: Case) -> str:
    return _pack(case.outputs, [f"y{number}" for number in range(len(case.heads))], "y")


def _functional(case: Case) -> list[str]:
    lines = [f"i = {_symbols(case)}", f"x = {case.start}", *_chain(case.trunk, "a"), *_ends(case)]
    return _function([*lines, f"return keras.Model(i, {_results(case)})"])


def _nested(case: Case) -> list[str]:
    """The trunk is a model within the model."""
    lines = [f"i = {_symbols(case)}", f"x = start = {case.start}"]
    inner = ["x = j = keras.Input(start.shape[1:], dtype=start.dtype)", *_chain(case.trunk, "a")]
    lines += [*inner, "x = keras.Model(j, x, name='inner')(start)", *_ends(case)]
    return _function([*lines, f"return keras.Model(i, {_results(case)})"])


def _sequential(case: Case) -> list[str]:
    parts = [*case.trunk, *case.heads[0].parts]
    makes = [str(part.makes[0]) for part in parts]
    first = [] if case.wiring == "lazy" else [case.sources[0].symbol]
    lines = ["m = keras.Sequential([", *(f"    {text}," for text in [*first, *makes]), "])"]
    lines += [f"m.layers[{k}].trainable = False" for k, part in enumerate(parts) if part.frozen]
    return _function([*lines, "return m"])


def _subclassed(case: Case) -> list[str]:
    """A subclassed model, whose layers are built in the first call."""
    made, calls = [], [f"x = {case.start}"]

    def add(parts: tuple[Part, ...], prefix: str) -> None:
        for number, part in enumerate(parts):
            names = [f"self.{prefix}{number}{'abc'[k]}" for k in range(len(part.makes))]
            made.extend(f"{name} = {make}" for name, make in zip(names, part.makes))
            if part.frozen:
                made.append(f"{names[0]}.trainable = False")
            calls.append(f"x = {part.form.format(*names)}")

    add(case.trunk, "a")
    calls.append("trunk = x")
    for number, head in enumerate(case.heads):
        calls.append("x = trunk")
        add(head.parts, f"h{number}_")
        calls.append(f"y{number} = x")
    calls.append(f"return {_results(case)}")
    return [
        "class Model(keras.Model):",
        "    def __init__(self):",
        "        super().__init__()",
        *("        " + line for line in made),
        "",
        "    def call(self, i):",
        *("        " + line for line in calls),
        "",
        *_function(["return Model()"]),
    ]


def _function(lines: list[str]) -> list[str]:
    return ["def build():", *("    " + line for line in lines)]


_SUBCLASSED = _subclassed
_BUILDERS = {
    "functional": _functional,
    "nested": _nested,
    "sequential": _sequential,
    "lazy": _sequential,
}


def _asked(case: Case, what: str) -> str:
    """The losses or metrics of all heads, in the outputs' structure."""

    def text(head: Head) -> str:
        value = getattr(head, what)
        return str(value) if what == "loss" else f"[{', '.join(map(str, value))}]"

    return _pack(case.outputs, [text(head) for head in case.heads], "y")


def _use(case: Case) -> list[str]:
    arguments = [f"optimizer={case.optimizer}", f"loss={_asked(case, 'loss')}"]
    for name, what in (("metrics", "metrics"), ("weighted_metrics", "weighted")):
        if any(getattr(head, what) for head in case.heads):
            arguments.append(f"{name}={_asked(case, what)}")
    arguments += [f"{name}={value}" for name, value in case.settings]
    again = ["    out = {}", *("    " + _ACTIONS[action](case) for action in case.actions)]
    return [
        "def again(m):",
        *again,
        "    return out",
        "",
        "def use(m):",
        f"    m.compile({', '.join(arguments)})",
        *_slots(case),
        "    return again(m)",
    ]


def _slots(case: Case) -> list[str]:
    """In a traced step plain Keras on TensorFlow loses what these slots begin with."""
    copies_weights = "ScheduleFree" in str(case.optimizer)
    return ["    m.built and m.optimizer.build(m.trainable_variables)"] if copies_weights else []


def _fit(case: Case) -> str:
    more = "".join(f", {name}={value}" for name, value in case.fit)
    if case.feeding == "arrays":
        feed = f"X, Y, batch_size={case.batch}, shuffle=False"
    elif case.feeding == "csr":
        feed = f"scipy_csr(X), Y, batch_size={case.batch}, shuffle=False"
    elif case.feeding == "dataset":
        feed = f"tf.data.Dataset.from_tensor_slices((X, Y)).batch({case.batch})"
    else:
        feed = f"batches(X, Y, {case.batch}), steps_per_epoch={-(-case.rows // case.batch)}"
    return f"out['fit'] = m.fit({feed}{more}, verbose=0).history"


def _given(case: Case) -> str:
    return "scipy_csr(X)" if case.feeding == "csr" else "X"


_ACTIONS = {
    "fit": _fit,
    "train": lambda case: (
        "out['train'] = [m.train_on_batch("
        "*keras.tree.map_structure(lambda a: a[k : k + size], (X, Y)), return_dict=True) "
        f"for size in ({case.batch},) for k in (0, size)]"
    ),
    "evaluate": lambda case: (
        f"out['evaluate'] = m.evaluate({_given(case)}, Y, batch_size={case.batch}, "
        "verbose=0, return_dict=True)"
    ),
    "predict": lambda case: (
        f"out['predict'] = m.predict({_given(case)}, batch_size={case.batch}, verbose=0)"
    ),
}
