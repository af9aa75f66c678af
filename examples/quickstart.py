"""The least it takes: one import, and a name as the strategy.

    python examples/quickstart.py

A table after each epoch says what was sent.
"""

import lightning as L
from digits import Digits, DigitsClassifier

import lightning_sparse as ls  # makes the names of the strategies known

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,  # two processes on this machine
        strategy="sparse_auto",  # was: "ddp"
        max_epochs=2,
        log_every_n_steps=10,
        callbacks=[ls.CompressionMonitor()],
    )
    trainer.fit(DigitsClassifier(), Digits())
