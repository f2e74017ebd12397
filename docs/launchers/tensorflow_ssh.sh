#!/usr/bin/env bash
# Plain SSH: a worker on each host, the training here.
#   ./tensorflow_ssh.sh gpu1 gpu2 -- --backup run7 --epochs 20
# Hosts are in a network that is private. Each has the same Python environment, with
# keras_multigpu[tensorflow], at the same place: PYTHON.
set -euo pipefail
PYTHON=${PYTHON:-python}
PORT=${PORT:-2222}

hosts=()
while [[ $# -gt 0 && $1 != -- ]]; do hosts+=("$1"); shift; done
shift

# The worker ends with its connection: `-tt` gives it a terminal, which hangs up.
workers=()
for host in "${hosts[@]}"; do
  ip=$(getent ahostsv4 "$host" | awk '{print $1; exit}') # a host may know itself as 127.0.1.1
  workers+=("$ip:$PORT")
  ssh -tt -o BatchMode=yes "$host" "$PYTHON" -m keras_multigpu serve --bind "$ip:$PORT" </dev/null &
done
trap 'kill $(jobs -p) 2>/dev/null' EXIT

# `connect` waits for workers that are still starting.
"$PYTHON" "$(dirname "$0")/tensorflow_train.py" --workers "${workers[@]}" --timeout 120 "$@"
