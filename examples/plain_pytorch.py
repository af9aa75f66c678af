"""An ordinary PyTorch loop around DistributedDataParallel, with checkpoints that keep what is unsent.

    torchrun --nproc-per-node=2 examples/plain_pytorch.py --epochs 5
    torchrun --nproc-per-node=2 examples/plain_pytorch.py --epochs 10 --resume plain_pytorch.ckpt

The second goes on where the first ended, bit for bit.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_sparse as ls


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")  # on GPUs: "nccl", and ddp on this rank's device
    train(args)
    dist.destroy_process_group()  # last, when ddp is gone: the other way round PyTorch may hang (its destructors wait)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--compressor", default="micro")
    parser.add_argument("--checkpoint", type=Path, default=Path("plain_pytorch.ckpt"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))  # [N, 64], [N]
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)  # small buckets: gradients arrive early
    hook = ls.SparseHook(ddp, args.compressor, fusion="layer")  # from here on gradients are averaged by it
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    first = 0
    if args.resume:  # on every rank, the same file
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hook.load_state_dict(saved["unsent"])
        first = saved["epochs"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same one when resumed
        loss_sum = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        unsent = hook.state_dict()  # gathers, so on every rank; complete on rank 0
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss_sum / len(loader):.4f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"unsent": unsent, "epochs": epoch + 1}, args.checkpoint)

    hook.close()


if __name__ == "__main__":
    main()
