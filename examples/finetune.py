"""Fine-tune: a part stays frozen, a part joins in later, and the learning rates differ.

    python examples/finetune.py --strategy micro --devices 2

A network that has learned the digits 0 to 4 learns 5 to 9. There are two kinds of frozen:

- Frozen for good: `requires_grad_(False)` before `fit`. DDP never sees such a parameter, so it must stay frozen until
  `fit` ends; the strategy refuses otherwise, since ranks would drift apart. To train it after all, start another `fit`.
- Frozen for a while: freeze in `on_train_start`, when DDP already knows the parameter, and give the strategy
  `find_unused_parameters=True`, or a name that ends so. Lightning's BackboneFinetuning freezes earlier, and is refused.
"""

import argparse

import lightning as L
import torch
from digits import Digits, DigitsClassifier
from torch.utils.data import TensorDataset

import lightning_sparse  # noqa: F401  makes the names of the strategies known

STEM, BODY, HEAD = "model.0", "model.2", "model.6"  # parts of the classifier


class SomeDigits(Digits):
    """Images of some of the ten digits."""

    def __init__(self, labels: range, batch_size: int = 16):
        super().__init__(batch_size)
        self.labels = labels

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train, self.test = self.select(self.train), self.select(self.test)

    def select(self, dataset: TensorDataset) -> TensorDataset:
        images, labels = dataset.tensors
        wanted = torch.isin(labels, torch.tensor(self.labels))  # [N]
        return TensorDataset(images[wanted], labels[wanted])


class FineTuned(DigitsClassifier):
    """The first convolution stays as it was learned, the second is trained slowly, the last layer is new."""

    def __init__(self, width: int = 32, lr: float = 0.05):
        super().__init__(width, lr)
        self.get_submodule(STEM).requires_grad_(False)  # before fit, so for good

    def take_over(self, pretrained: DigitsClassifier) -> None:
        """Start from what ``pretrained`` has learned, but for the last layer."""
        learned = {name: value for name, value in pretrained.state_dict().items() if not name.startswith(HEAD)}
        self.load_state_dict(learned, strict=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.get_submodule(BODY).parameters(), "lr": self.hparams.lr / 10},  # frozen: has no gradient
            {"params": self.get_submodule(HEAD).parameters(), "lr": self.hparams.lr},
        ]
        return torch.optim.SGD(groups, momentum=self.hparams.momentum)


class FreezeAtFirst(L.Callback):
    """Keeps the second convolution frozen until ``epoch`` starts."""

    def __init__(self, epoch: int):
        self.epoch = epoch

    def on_train_start(self, trainer: L.Trainer, pl_module: FineTuned) -> None:
        pl_module.get_submodule(BODY).requires_grad_(False)  # not earlier: DDP has to know that it will be trained

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: FineTuned) -> None:
        if trainer.current_epoch == self.epoch:
            pl_module.get_submodule(BODY).requires_grad_(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="sparse_auto")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning; the body joins in after half of them")
    args = parser.parse_args()

    def trainer(strategy: str, epochs: int, *callbacks: L.Callback) -> L.Trainer:
        return L.Trainer(
            strategy=strategy,
            accelerator=args.accelerator,
            devices=args.devices,
            max_epochs=epochs,
            callbacks=list(callbacks),
            log_every_n_steps=10,
        )

    L.seed_everything(0)
    pretrained = DigitsClassifier()
    trainer(args.strategy, 2).fit(pretrained, SomeDigits(range(5)))

    model = FineTuned()
    model.take_over(pretrained)
    tuning = trainer(f"{args.strategy}_find_unused_parameters_true", args.epochs, FreezeAtFirst(args.epochs // 2))
    tuning.fit(model, SomeDigits(range(5, 10)))
    if tuning.is_global_zero:
        print(f"val_acc: {tuning.callback_metrics['val_acc']:.3f}")
        same = torch.equal(model.get_submodule(STEM).weight.cpu(), pretrained.get_submodule(STEM).weight.cpu())
        print(f"the first convolution is {'as it was' if same else 'changed'}")


if __name__ == "__main__":
    main()
