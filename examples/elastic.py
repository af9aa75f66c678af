"""Train digits on hosts that come and go: kill one, start another, and see the others go on.

    torchft_lighthouse --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/elastic.py --host a

The second line in two terminals or more, each with a --host of its own; on one machine each is a host too.
"""

import argparse

import lightning as L
from digits import Digits, DigitsClassifier
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_sparse as ls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="the name of this host, which no other has")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for a host that has stopped")
    parser.add_argument("--resume", help="a checkpoint of any host")
    args = parser.parse_args()

    L.seed_everything(0)
    strategy = ls.SparseDDPStrategy(
        "sparse_dense",
        local_steps=2,
        wire_dtype="int4",
        elastic=ls.Elastic(timeout=args.timeout, replica_id=args.host),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=args.max_steps,
        callbacks=[ls.CompressionMonitor(table=False), ModelCheckpoint(f"checkpoints/{args.host}", save_last=True)],
        limit_val_batches=0,  # hosts would wait for each other; once, at the end
        log_every_n_steps=10,
    )
    model, data = DigitsClassifier(), Digits(batch_size=16)
    trainer.fit(model, data, ckpt_path=args.resume)
    print(f"{args.host}: {trainer.callback_metrics['sparse/hosts']:.0f} hosts at the end")
    trainer.limit_val_batches = 1.0
    trainer.validate(model, data, verbose=False)  # of the average, the same on every host
    print(f"val_acc: {trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()
