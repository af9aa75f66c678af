#!/usr/bin/env bash
# Train on several machines with SLURM: two machines with four GPUs each.
#
#     sbatch examples/multinode_slurm.sh --strategy micro
#
# Submit from the root of the checkout, with the environment activated. Arguments go to the script.
#SBATCH --job-name=lightning-sparse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
set -euo pipefail

# Where a machine has several networks, say which one to use:
# export NCCL_SOCKET_IFNAME=eth0

# One task is one process is one GPU. Lightning reads ranks and addresses from SLURM; torchrun is not needed.
srun python examples/digits.py --accelerator gpu \
  --num-nodes "$SLURM_JOB_NUM_NODES" --devices "$SLURM_NTASKS_PER_NODE" "$@"
