"""The command line: which attacks, and how often. The exit status is 1 if anything broke."""

import argparse
import sys

import keras

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=int, default=10, help="how often; less where an attack is dear")
parser.add_argument("--only", nargs="*", default=(), help="the names of attacks; all by default")
parser.add_argument("--gigabytes", type=float, help="of large weights, for less than usual")
chosen = parser.parse_args()
if keras.backend.backend() == "tensorflow":
    from support.cluster_attacks.on_tensorflow import attack_all
else:
    from support.cluster_attacks.on_jax import attack_all
print("| attack | outcomes | longest, s | afterwards |\n|---|---|---|---|", flush=True)
sys.exit(any(row.broken for row in attack_all(chosen.times, chosen.only, chosen.gigabytes)))
