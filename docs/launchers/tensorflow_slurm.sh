#!/usr/bin/env bash
#SBATCH --job-name=keras_multigpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
# Slurm: a worker on each node, the training on the first one, which drives them all.
#   sbatch tensorflow_slurm.sh
# Run again, by `--requeue` or by hand, it goes on from its last backup. PYTHON is an environment
# with keras_multigpu[tensorflow] that all nodes see.
set -euo pipefail
PYTHON=${PYTHON:-python}
PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on one node don't meet
HERE=$SLURM_SUBMIT_DIR

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --overlap --kill-on-bad-exit=0 bash -c \
  "exec $PYTHON -m keras_multigpu serve --bind \$SLURMD_NODENAME:$PORT" &
trap 'kill $(jobs -p) 2>/dev/null' EXIT

# The workers have the GPUs: the process that drives them computes nothing on one.
CUDA_VISIBLE_DEVICES='' "$PYTHON" "$HERE/tensorflow_train.py" \
  --workers "${hosts[@]/%/:$PORT}" --timeout 120 --backup "$HERE/backup" "$@"
