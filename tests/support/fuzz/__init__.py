"""A differential fuzzer: it draws models, trains each one plain and parallel, and compares them.

    python -m tests.support.fuzz --seconds 600 --seed 1 --modes data --processes 1 --out /tmp/fuzz

- `catalogue`, `values`, `inputs`, `heads`, `optimizers`, `extra` say what there is to draw;
- `draw` draws a `case.Case`, which is a program in parts; `program` writes it as Python text;
- `run` runs that text on a plain and on a parallel model, `compare` says how far apart they are;
- `shrink` simplifies a case whose two results differ, and `program` writes it as a short script;
- `drive` does so for a fixed time in processes of its own, and counts the outcomes.

A case is drawn from its backend, seed and index alone, so these three name it.
"""
