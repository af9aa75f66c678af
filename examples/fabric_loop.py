"""The same loop as plain_pytorch.py with Lightning Fabric, which starts the processes and places the tensors.

    python examples/fabric_loop.py --epochs 5
    python examples/fabric_loop.py --epochs 10 --resume fabric_loop.ckpt

The second goes on where the first ended, with what is unsent.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse  # noqa: F401  makes the names of the strategies known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="micro")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default="fabric_loop.ckpt")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    # Settings of your own: strategy=lightning_sparse.fabric.SparseDDPStrategy(lightning_sparse.MiCRO(density=0.05)).
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, strategy=args.strategy)
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))  # [N, 64], [N]
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16, shuffle=True))

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    hook = fabric.strategy.hooks[0]  # one for each module that was set up
    state = {"model": model, "optimizer": optimizer, "unsent": hook, "epochs": 0}  # all that a checkpoint needs
    if args.resume:
        fabric.load(args.resume, state)

    for epoch in range(state["epochs"], args.epochs):
        loss_sum = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            loss_sum += loss.item()
        fabric.print(f"epoch {epoch}: loss {loss_sum / len(loader):.4f}")
        state["epochs"] = epoch + 1
        fabric.save(args.checkpoint, state)  # on every rank


if __name__ == "__main__":
    main()
