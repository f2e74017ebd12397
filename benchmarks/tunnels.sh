#!/usr/bin/env bash
# Tries the two safe ways of docs/cluster.md on three network namespaces, which stand for three
# machines: a private network, and SSH tunnels through loopback addresses only. Needs Linux, root,
# and sshd.
#   sudo PYTHON=.venv/bin/python benchmarks/tunnels.sh
set -euo pipefail
PYTHON=${PYTHON:-python}
SSHD=${SSHD:-/usr/sbin/sshd}
export CUDA_VISIBLE_DEVICES='' TF_CPP_MIN_LOG_LEVEL=2
work=$(mktemp -d)
started=()

finish() {
  kill "${started[@]}" 2>/dev/null || true
  for one in driver gpu1 gpu2; do ip netns del "kmg-$one" 2>/dev/null || true; done
  ip link del kmg-bridge 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT

on() { local host=$1; shift; ip netns exec "kmg-$host" "$@"; }

ip link add kmg-bridge type bridge
ip link set kmg-bridge up
number=0
for host in driver gpu1 gpu2; do
  number=$((number + 1))
  ip netns add "kmg-$host"
  ip link add "kmg-v$number" type veth peer name eth0 netns "kmg-$host"
  ip link set "kmg-v$number" master kmg-bridge up
  on "$host" ip link set lo up
  on "$host" ip link set eth0 up
  on "$host" ip addr add "10.77.0.$number/24" dev eth0
done

serve() { # on which machine, at what address
  on "$1" "$PYTHON" -m keras_multigpu serve --bind "$2" >"$work/$1.log" 2>&1 &
  started+=($!)
}

train() { # the words of `connect`
  on driver timeout 200 "$PYTHON" - <<END
import keras, numpy as np
from keras_multigpu import cluster, make_parallel
x = np.random.default_rng(7).normal(size=(70, 6)).astype("float32")
def train(parallel):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    model = make_parallel(model, devices=devices) if parallel else model
    model.compile("adam", "mse")
    model.fit(x, x[:, :2], batch_size=32, shuffle=False, verbose=0)
    return model.get_weights()
alone = train(False)
devices = cluster.connect($1)
pairs = zip(train(True), alone)
print(*devices, "largest difference:", max(abs(a - b).max() for a, b in pairs))
END
}

reaches() { on "$1" timeout 2 bash -c "exec 3<>/dev/tcp/$2/$3" 2>/dev/null && echo yes || echo no; }

echo "A private network:"
serve gpu1 10.77.0.2:2222
serve gpu2 10.77.0.3:2222
train '["10.77.0.2:2222", "10.77.0.3:2222"], timeout=60'
kill "${started[@]}"; wait "${started[@]}" 2>/dev/null || true; started=()

echo "SSH tunnels, workers at 127.0.0.1 only:"
ssh-keygen -q -t ed25519 -N '' -f "$work/key"
ssh-keygen -q -t ed25519 -N '' -f "$work/host"
chmod 755 "$work"
mkdir -p /run/sshd
for host in gpu1 gpu2; do
  on "$host" "$SSHD" -D -e -f /dev/null -h "$work/host" -o StrictModes=no \
    -o "AuthorizedKeysFile=$work/key.pub" -o PidFile=none -o UsePAM=no >"$work/sshd.$host" 2>&1 &
  started+=($!)
done
serve gpu1 127.0.0.1:2221
serve gpu2 127.0.0.1:2222
sleep 2
tunnel=(ssh -N -i "$work/key" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null
  -o LogLevel=ERROR -o ExitOnForwardFailure=yes)
on driver "${tunnel[@]}" -L 2221:127.0.0.1:2221 -R 2222:127.0.0.1:2222 -R 2220:127.0.0.1:2220 \
  root@10.77.0.2 & started+=($!)
on driver "${tunnel[@]}" -L 2222:127.0.0.1:2222 -R 2221:127.0.0.1:2221 -R 2220:127.0.0.1:2220 \
  root@10.77.0.3 & started+=($!)
train '["127.0.0.1:2221", "127.0.0.1:2222"], local="127.0.0.1:2220", timeout=60'
echo "gpu1's worker is reached from gpu1 by 127.0.0.1: $(reaches gpu1 127.0.0.1 2221)," \
  "by 10.77.0.2: $(reaches gpu1 10.77.0.2 2221), from gpu2: $(reaches gpu2 10.77.0.2 2221)"
