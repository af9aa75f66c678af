"""Train a small convolutional network on 1,797 handwritten digits (they come with scikit-learn).

    python examples/digits.py --strategy sparse_auto --devices 4 --max-steps 200

Every process takes its share of the images; a test at the end gives the accuracy.
"""

import argparse
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_sparse  # noqa: F401  registers the strategies

# The data is in memory: worker processes would only slow the loading down.
warnings.filterwarnings("ignore", ".*does not have many workers.*")
# Lightning 2.6 uses a class that newer versions of torch call deprecated; a reader can do nothing about it.
warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)

CLASSES = 10


class Digits(L.LightningDataModule):
    """Images of 8 x 8 pixels; a fifth of each class, always the same images, is held out for the test.

    ``batch_size`` counts the images of one process.
    """

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)  # [N, 1, 8, 8], from 0 to 1
        labels = torch.tensor(digits.target)  # [N]
        train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
        self.train = TensorDataset(images[train], labels[train])
        self.test = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


class DigitsClassifier(L.LightningModule):
    """Two convolutions and one linear layer, trained by SGD with momentum."""

    def __init__(self, width: int = 32, lr: float = 0.05, momentum: float = 0.9):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),  # [B, width, 8, 8]
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),  # [B, 2 width, 8, 8]
            nn.ReLU(),
            nn.MaxPool2d(2),  # [B, 2 width, 4, 4]
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, CLASSES),  # [B, 10]
        )
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:  # [B, 1, 8, 8]
        return self.model(images)  # [B, 10]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_acc", self.val_acc, prog_bar=True)
        self.log("val_loss", cross_entropy(logits, labels), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)
        steps = self.trainer.estimated_stepping_batches
        schedule = OneCycleLR(optimizer, self.hparams.lr, steps, pct_start=0.1, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="sparse_auto")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="number of processes (on the CPU) or of GPUs")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines; each then starts as many processes")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="images of each process in a step")
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
        log_every_n_steps=10,
    )
    trainer.fit(DigitsClassifier(), Digits(batch_size=args.batch_size))
    if trainer.is_global_zero:
        print(f"val_acc: {trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()
