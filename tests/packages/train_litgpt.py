"""LitGPT's model in a Trainer, as its README shows, on the source code of Python's library."""

import lightning as L
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from program import Losses, main
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.bench.compare.workloads import other_source_code, source_windows


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Config(block_size=64, padded_vocab_size=256, n_layer=2, n_head=4, n_embd=128))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0].long()
        return chunked_cross_entropy(self.gpt(text[:, :-1]), text[:, 1:], chunk_size=0)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(strategy: str, seed: int, losses: Losses) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[losses], max_steps=240, val_check_interval=60,
        enable_checkpointing=False, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    training = DataLoader(TensorDataset(source_windows(2_000_000)), 8, shuffle=True)
    trainer.fit(Model(), training, DataLoader(TensorDataset(other_source_code()), 32))


if __name__ == "__main__":
    main(train, "val_loss")
