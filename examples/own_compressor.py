"""A compressor of your own: of each value its sign and nothing else, a thirty-second of the bytes.

    python examples/own_compressor.py

It is EF-signSGD (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019): every rank sends the mean magnitude of
its gradient and the signs, eight in a byte, and keeps the difference. The rules are in docs/writing-a-compressor.md.
"""

from dataclasses import dataclass

import lightning as L
import torch
from digits import Digits, DigitsClassifier
from torch import Tensor

import lightning_sparse as ls


@dataclass(frozen=True)  # settings only: what changes from step to step lives in the group
class Signs(ls.Compressor):
    """Sends ``scale * sign(x)``; the scale is the mean magnitude of the group."""

    def reduce(self, group: ls.Group, comm: ls.Comm) -> ls.Rounds:
        scale = group.unsent.abs().mean()
        positive = group.unsent >= 0  # [n]
        group.unsent -= scale * sign(positive)  # what this rank sends it takes out, and nothing is lost
        messages = comm.all_gather(pack(positive)), comm.all_gather(scale.view(1))  # both under way at once
        packed = yield messages[0]  # [P, bytes]
        scales = yield messages[1]  # [P, 1]
        total = torch.zeros_like(group.unsent)
        for rank in range(comm.size):  # in the same order everywhere, so to the same bits
            total += scales[rank] * sign(unpack(packed[rank], group.n))
        return total  # the sum over the ranks, [n]


def sign(positive: Tensor) -> Tensor:
    return positive * 2.0 - 1


def pack(bits: Tensor) -> Tensor:  # [n] bool
    eights = torch.nn.functional.pad(bits.byte(), (0, -len(bits) % 8)).view(-1, 8)
    return (eights << places(bits)).sum(1, dtype=torch.uint8)  # [n / 8, rounded up]


def unpack(packed: Tensor, n: int) -> Tensor:
    return (packed.unsqueeze(1) >> places(packed) & 1).flatten()[:n]  # [n] of 0 and 1


def places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def main() -> None:
    # A first look, in this process: 10 steps of 4 ranks, 1,000 elements. Where real processes would hang, it says why.
    tried = ls.simulate(Signs(), torch.randn(10, 4, 1000))
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ls.SparseDDPStrategy(Signs(), fusion="none"),  # a scale for each layer, as in the paper
        max_epochs=5,
        log_every_n_steps=10,
        callbacks=[ls.CompressionMonitor()],
    )
    trainer.fit(DigitsClassifier(), Digits())
    if trainer.is_global_zero:
        print(f"4 ranks send {tried.sent_bytes[0].tolist()} bytes in a step; what they keep: {tried.unsent.norm():.1f}")
        print(f"val_acc: {trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()
