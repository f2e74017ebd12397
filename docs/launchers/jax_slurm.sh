#!/usr/bin/env bash
#SBATCH --job-name=keras-multigpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
# One process on each node, which has all of its GPUs. Submit it in a folder that all nodes share,
# with the virtual environment .venv in it: sbatch jax_slurm.sh
set -euo pipefail
export KERAS_BACKEND=jax
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR="$first:12345"
# --kill-on-bad-exit: when one process has ended with an error, all end.
srun --kill-on-bad-exit=1 bash -c \
  'exec .venv/bin/python jax_train.py "$COORDINATOR" "$SLURM_NTASKS" "$SLURM_PROCID" "$PWD/run"'
