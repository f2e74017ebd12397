#!/usr/bin/env bash
#SBATCH --job-name=keras-multigpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
# One process on each node, which has all of its GPUs. Submit it in a folder that all nodes share,
# with the virtual environment .venv in it: sbatch join_slurm.sh
set -euo pipefail
export KERAS_BACKEND="${KERAS_BACKEND:-tensorflow}"
# `join` reads Slurm's variables. --kill-on-bad-exit: when one process has ended with an error, all
# end.
srun --kill-on-bad-exit=1 .venv/bin/python join_train.py "$PWD/run"
