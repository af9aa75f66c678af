#!/usr/bin/env bash
# Train on several machines with torchrun: run this on each of them, with its own NODE_RANK.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=first-machine examples/multinode_torchrun.sh --strategy micro   # on the first
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=first-machine examples/multinode_torchrun.sh --strategy micro   # on the second
#
# NPROC is the number of processes, or of GPUs, of each machine. Arguments go to the script.
set -euo pipefail

NNODES=${NNODES:-2}
NPROC=${NPROC:-1}

# Where a machine has several networks, say which one to use:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# The Trainer is told what torchrun is told: devices for each machine, and the number of machines.
exec torchrun \
  --nnodes="$NNODES" \
  --nproc-per-node="$NPROC" \
  --node-rank="${NODE_RANK:?is the number of this machine, from 0}" \
  --master-addr="${MASTER_ADDR:?is the name or address of the machine with NODE_RANK=0}" \
  --master-port="${MASTER_PORT:-29500}" \
  "$(dirname "$0")/digits.py" --num-nodes "$NNODES" --devices "$NPROC" "$@"
