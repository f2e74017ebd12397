"""A differential fuzzer: it draws models, trains each one plain and parallel, and compares them.

    python -m tests.support.fuzz --seconds 600 --seed 1 --modes data --processes 1 --out /tmp/fuzz

- `catalogue`, `values`, `inputs`, `heads`, `optimizers`, `extra` list what can be drawn;
- `draw` draws a `case.Case`, a program in parts, and `settings` its training;
  `program` writes both as Python text;
- `run` compares a plain and a parallel model's `trainings` of that text;
  `compare` measures the differences;
- `shrink` simplifies a case with different results, and `scripts` writes it as a short script;
- `drive` does this for a fixed time in separate processes, and counts the outcomes.

The backend, the seed and the index determine a case, so these three name it.
"""
