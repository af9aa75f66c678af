"""Train a GPT of 50 million parameters that is sharded inside nodes; what crosses nodes is compressed.

    python examples/sharded.py --replicate-size 2 --devices 4 --max-steps 20

Here the nodes are pairs of processes of one machine.  On real nodes leave out --replicate-size, give --num-nodes, and
start the program on each with torchrun.
"""

import argparse

import lightning as L
from byte_lm import ByteLM, StdlibBytes
from torch.distributed.fsdp import FSDPModule, fully_shard

import lightning_sparse as ls


class ShardedLM(ByteLM):
    """The language model of byte_lm.py, each block of which is sharded over the devices of a node."""

    def configure_model(self) -> None:
        if isinstance(self, FSDPModule):  # Lightning calls this again for a second fit
            return
        mesh = self.device_mesh["shard"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="sparse_dense")
    parser.add_argument("--wire-dtype", default="int4", help="of values between nodes")
    parser.add_argument("--replicate-size", type=int, help="replicas of the model; as many as nodes by default")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="number of processes (on the CPU) or of GPUs")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--width", type=int, default=640, help="with 10 layers 640 makes 50 million parameters")
    parser.add_argument("--max-steps", type=int, default=20)
    args = parser.parse_args()

    L.seed_everything(0)
    strategy = ls.SparseHSDPStrategy(
        args.compressor, wire_dtype=args.wire_dtype, replicate_size=args.replicate_size or "auto"
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_steps=args.max_steps,
        limit_val_batches=4,
        callbacks=[ls.CompressionMonitor()],
    )
    model = ShardedLM(d_model=args.width, layers=10, heads=10)
    trainer.fit(model, StdlibBytes(batch_size=2))
    if trainer.is_global_zero:
        report = strategy.averager.last
        print(f"sent {report.sent_bytes / 2**20:.1f} MiB a step and rank; {report.dense_bytes / 2**20:.1f} in float32")
        print(f"train_loss: {trainer.callback_metrics['train_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
