"""Train a small GPT on the bytes of Python's own standard library.

    python examples/byte_lm.py --strategy sparse_auto --devices 4 --max-steps 300

The text is the source code that every Python installation carries: nothing is downloaded.
"""

import argparse
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse  # noqa: F401  registers the strategies

# The data is in memory: worker processes would only slow the loading down.
warnings.filterwarnings("ignore", ".*does not have many workers.*")
# Lightning 2.6 uses a class that newer versions of torch call deprecated; a reader can do nothing about it.
warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)

VOCABULARY = 256  # one token a byte
VALIDATION_EVERY = 20  # every 20th file is held out


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """Top-level modules of the standard library, as (training files, validation files)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    validation = files[::VALIDATION_EVERY]
    training = [file for file in files if file not in validation]
    return training, validation


def read_bytes(files: list[Path], max_bytes: int) -> Tensor:
    """Concatenate the files and keep the first ``max_bytes`` bytes."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)  # [bytes]


def cut_windows(tokens: Tensor, context: int) -> TensorDataset:
    """Cut into windows next to each other: the inputs, and the same shifted by one byte as targets."""
    windows = tokens.unfold(0, context + 1, context)  # [N, context + 1]
    return TensorDataset(windows[:, :-1], windows[:, 1:])


class StdlibBytes(L.LightningDataModule):
    """Windows of ``context`` bytes from the standard library, split into training and validation by file.

    ``batch_size`` counts the windows of one process. Training reads at most ``max_bytes`` bytes,
    validation at most a fortieth of that.
    """

    def __init__(self, context: int = 64, batch_size: int = 8, max_bytes: int = 4_000_000):
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        training, validation = stdlib_files()
        self.train = cut_windows(read_bytes(training, self.max_bytes), self.context)
        self.val = cut_windows(read_bytes(validation, self.max_bytes // 40), self.context)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a two-layer perceptron."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.attention_out = nn.Linear(d_model, d_model)
        self.mlp = nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, C / H]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, C / H]
        y = scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, C / H]
        return self.attention_out(y.transpose(1, 2).flatten(2))  # [B, T, C]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # [B, T, C]
        return x + self.mlp(x)  # [B, T, C]


class ByteLM(L.LightningModule):
    """Language model over bytes; the losses are in nats per byte. The default has about 1M parameters."""

    def __init__(
        self,
        d_model: int = 192,
        layers: int = 2,
        heads: int = 4,
        context: int = 64,
        lr: float = 3e-4,
        tie_weights: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(VOCABULARY, d_model)
        self.position = nn.Embedding(context, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        if tie_weights:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T]
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [T]
        x = self.token(tokens.long()) + self.position(positions)  # [B, T, C]
        return self.head(self.norm(self.blocks(x)))  # [B, T, 256]

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch  # each [B, T]
        return cross_entropy(self(inputs).flatten(0, 1), targets.flatten().long())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = OneCycleLR(optimizer, self.hparams.lr, steps, pct_start=0.1, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="sparse_auto")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="number of processes (on the CPU) or of GPUs")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines; each then starts as many processes")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of each process in a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    L.seed_everything(args.seed)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_steps=args.max_steps,
        val_check_interval=args.max_steps,  # validate once, at the end
        check_val_every_n_epoch=None,
    )
    trainer.fit(ByteLM(), StdlibBytes(batch_size=args.batch_size))
    if trainer.is_global_zero:
        print(f"val_loss: {trainer.callback_metrics['val_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
