"""How tensors are sent between the devices of this process, and in which type.

Large ones go through *hubs*, so that no device carries much more than the others. To another host
a tensor crosses once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.tensorflow.names import host_of
from keras_multigpu.engines.tensorflow.partition.program import Crossing, Node
from keras_multigpu.engines.tensorflow.weights.hubs import Part, divide, shares_of

LEAST = 1024  # elements of what goes through hubs


def wire_here(devices: Any, dtype: tf.DType, what: Crossing) -> tf.DType:
    """The type in which a tensor crosses between this process's devices."""
    return wire_of(devices, dtype, what) if len(devices.names) > 1 else dtype


def wire_of(devices: Any, dtype: tf.DType, what: Crossing | None) -> tf.DType:
    """The type in which a tensor crosses between processes."""
    is_trained = what is not None and what.is_trained and dtype.is_floating
    return tf.as_dtype(devices.wire_dtype) if devices.wire_dtype and is_trained else dtype


def copies(devices: Any, whole: Any, what: Crossing) -> list[Any]:
    """A copy on each device; to each other host the tensor crosses once."""
    wire = wire_here(devices, whole.dtype, what)
    with tf.device(devices.home):
        sent = tf.cast(whole, wire)
    found = dict.fromkeys(devices.names, sent)
    for names in hosts_of(devices):
        if host_of(names[0]) != host_of(devices.home):
            with tf.device(names[0]):
                # TensorFlow would remove an identity, and send to each device.
                found.update(dict.fromkeys(names, tf.raw_ops.Snapshot(input=sent)))
    return devices.each(lambda name: tf.cast(found[name], whole.dtype), devices.names)


def sum_of(devices: Any, parts: Sequence[Any], what: Crossing) -> Any:
    """The sum at home; from each other host one sum crosses."""
    dtype = parts[0].dtype
    wire = wire_here(devices, dtype, what)
    sent = dict(zip(devices.names, devices.each(lambda part: tf.cast(part, wire), parts)))
    sums = []
    for names in hosts_of(devices):
        with tf.device(names[0]):
            total = sum_as(dtype, [sent[name] for name in names])
            sums.append(total if names[0] == devices.home else tf.cast(total, wire))
    with tf.device(devices.home):
        return sum_as(dtype, sums)


def sum_as(dtype: tf.DType, addends: Sequence[Any]) -> Any:
    """A sum in a type."""
    return tf.add_n([tf.cast(one, dtype) for one in addends])


def hosts_of(devices: Any) -> list[list[str]]:
    """The names of the devices of each host; of the home's own, the home comes first."""
    found: dict[str, list[str]] = {}
    for name in sorted(devices.names, key=lambda name: name != devices.home):
        found.setdefault(host_of(name), []).append(name)
    return list(found.values())


def copy_by_hubs(devices: Any, whole: Any, parts: Sequence[Part], what: Crossing) -> list[Any]:
    """The owner sends each piece to its hub, which sends it to the others."""
    wire = wire_here(devices, whole.dtype, what)
    with tf.device(devices.home):
        pieces = _cut(tf.cast(whole, wire), parts)
    passed = []
    for part, piece in zip(parts, pieces):
        with tf.device(part.hub):
            passed.append(tf.identity(piece))

    def arrived(name: str) -> Any:
        joined = tf.cast(whole, wire)
        if name != devices.home:
            joined = passed[0] if len(parts) == 1 else tf.concat(passed, 0)
            joined = joined if len(parts) == 1 else tf.reshape(joined, what.shape)
        return tf.cast(joined, whole.dtype)

    return devices.each(arrived, devices.names)


def sum_by_hubs(devices: Any, addends: list[Any], parts: Sequence[Part], what: Crossing) -> Any:
    """Each hub sums its piece; the owner joins the sums."""
    dtype = addends[0].dtype
    wire = wire_here(devices, dtype, what)
    with tf.name_scope("gradients" if what.is_trained else "sums"):
        pieces = devices.each(lambda addend: _cut(tf.cast(addend, wire), parts), addends)
        sums = []
        for part, column in zip(parts, zip(*pieces)):
            with tf.device(part.hub):
                sums.append(tf.cast(sum_as(dtype, column), wire))
        with tf.device(devices.home):
            joined = sums[0] if len(sums) == 1 else tf.reshape(tf.concat(sums, 0), what.shape)
            return tf.cast(joined, dtype)


def _cut(tensor: Any, parts: Sequence[Part]) -> list[Any]:
    if len(parts) == 1:
        return [tensor]
    return tf.split(tf.reshape(tensor, [-1]), [part.stop - part.start for part in parts])


def hubs_of(nodes: Sequence[Node], names: Sequence[str], home: str) -> dict[int, tuple[Part, ...]]:
    """The pieces in which copies and sums go through hubs, by the `id` of the node.

    What is small goes directly, and so does what crosses between hosts.
    """
    if len(set(map(host_of, [home, *names]))) > 1:
        return {}
    found: dict[int, tuple[Part, ...]] = {}
    for kind in ("copy", "sum"):
        sizes = {
            id(node): node.crossing.size
            for node in nodes
            if node.crossing is not None
            and node.crossing.kind == kind
            and (node.crossing.size or 0) >= LEAST
        }
        if sizes and len(names) > 1:
            found.update(divide(sizes, shares_of(names, home, back=kind == "sum")))  # type: ignore[arg-type]
    return found
