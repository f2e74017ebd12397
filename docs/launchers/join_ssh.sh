#!/usr/bin/env bash
# One process on each host, over SSH: bash join_ssh.sh HOST_A HOST_B ...
# Every host has this folder at the same path, with the virtual environment .venv in it, and reaches
# the first one at PORT, on a private network.
set -euo pipefail
PORT=12345
hosts=("$@")
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for number in "${!hosts[@]}"; do
  # -tt: when this script ends, so does the process on the host.
  ssh -tt "${hosts[$number]}" "cd '$PWD' && KERAS_BACKEND=${KERAS_BACKEND:-tensorflow} \
    .venv/bin/python join_train.py '$PWD/run' '${hosts[0]}:$PORT' ${#hosts[@]} $number" </dev/null &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
