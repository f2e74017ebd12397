"""Bytes that each of several joined processes sends and receives in a training step (TensorFlow).

python -m benchmarks.joined [--processes 2] [--steps 10] [--wire bfloat16] [--data parts] [--shard]

The processes run on this machine. What they send is read from the system's counters of their
sockets, so it includes everything: gradients, outputs, checks, parts of batches, signs of life
and the protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time

_ACKNOWLEDGED = 120  # in Linux's `struct tcp_info`, followed by the bytes received
_UNITS, _LAYERS, _ROWS = 1024, 4, 64


def main() -> None:
    """Starts the processes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--wire", choices=["bfloat16", "float16"], default="")
    parser.add_argument("--data", choices=["same", "parts"], default="same")
    parser.add_argument("--shard", action="store_true", help='with shard="weights"')
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    count, more = str(options.processes), [str(options.steps), options.data, options.wire]
    more.append("weights" if options.shard else "")
    started = [
        subprocess.Popen(
            [sys.executable, __file__, address, count, str(number), *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        )
        for number in range(options.processes)
    ]
    print("| process | sent, MB a step | received | of 2 P (h - 1) / h | ms a step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for number, process in enumerate(started):
        output, _ = process.communicate()
        found = json.loads(output.splitlines()[-1])
        least = 2 * found["weights"] * (options.processes - 1) / options.processes
        sent, received = found["sent"], found["received"]
        print(
            f"| {number} | {sent / 1e6:.2f} | {received / 1e6:.2f} | "
            f"{sent / least:.3f}, {received / least:.3f} | {1e3 * found['seconds']:.0f} |"
        )


def work(
    address: str, count: int, number: int, steps: int, data: str, wire: str, shard: str
) -> None:
    """Trains in one process, and prints what it has sent."""
    import keras
    import numpy as np

    from keras_multigpu import cluster, make_parallel

    cluster.join(address, count, number, timeout=120, data=data)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(_UNITS, "relu") for _ in range(_LAYERS)]
    model = keras.Sequential([keras.Input((_UNITS,)), *layers, keras.layers.Dense(1)])
    parallel = make_parallel(model, wire_dtype=wire or None, shard=shard or None)
    parallel.compile("sgd", "mse")
    rows = _ROWS if data == "same" else _ROWS // count
    x, y = np.ones((steps * rows, _UNITS), "float32"), np.ones((steps * rows, 1), "float32")
    parallel.fit(x[:rows], y[:rows], batch_size=rows, verbose=0)
    before, begun = _count(), time.perf_counter()
    parallel.fit(x, y, batch_size=rows, verbose=0)
    seconds, after = (time.perf_counter() - begun) / steps, _count()
    sent, received = ((late - early) / steps for early, late in zip(before, after))
    weights = sum(int(np.prod(one.shape)) * 4 for one in model.trainable_weights)
    found = {"sent": sent, "received": received, "weights": weights, "seconds": seconds}
    print(json.dumps(found), flush=True)


def _count() -> tuple[int, int]:
    """The bytes that this process has sent and received on its TCP connections so far."""
    sent = received = 0
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            one.getpeername()  # an error if it is not connected
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 16)
            numbers = struct.unpack_from("QQ", info, _ACKNOWLEDGED)
            sent, received = sent + numbers[0], received + numbers[1]
    return sent, received


if __name__ == "__main__":
    if len(sys.argv) == 8 and ":" in sys.argv[1]:
        work(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
    else:
        main()
