"""A stress test: trains random models on many virtual devices, and finds trainings that hang.

    python -m tests.support.stress --seconds 600 --devices 2 4 8 16 --seed 1

- `draw` draws a `fuzz.case.Case`: the fuzzer's models, and wide ones, whose gradients are large;
- `child` is a process that trains one after the other, and writes a line after every step;
- `watch` reads these lines; if they stop, it shows where the process hangs.
"""
