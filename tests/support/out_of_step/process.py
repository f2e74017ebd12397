"""One process of a way: `process.py WAY_ODD FOLDER COUNT NUMBER ADDRESS`."""

import sys

import keras
from support.out_of_step.ways import WAYS

import keras_multigpu
from keras_multigpu.cluster import join

TIMEOUT = 8.0


def run(way, odd, count, number, address, timeout=TIMEOUT):
    """Runs a way; says how it ends."""
    function, _, _, data = WAYS[way]
    if keras.backend.backend() == "tensorflow":
        keras_multigpu.use_virtual_devices(2)  # as on JAX, where a process has at least two
    join(address, count, number, timeout=timeout, data=data)
    try:
        function(number == odd)
    except BaseException as error:
        print(f"\nends with {type(error).__name__}: {error}", flush=True)
        raise
    print("\nends with nothing", flush=True)


if __name__ == "__main__":
    way, odd = sys.argv[1].split("@")
    run(way, int(odd), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], timeout=30.0)
