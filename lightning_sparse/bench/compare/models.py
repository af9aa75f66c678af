"""Models that a benchmark trains."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

CONTEXT = 64  # bytes that a byte model sees


class Classifier(LightningModule):
    """Layers that classify images of digits."""

    def __init__(self, layers: Sequence[nn.Module], learning_rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.learning_rate = learning_rate

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of images [B, 1, 8, 8] and labels [B]."""
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def mlp(width: int, hidden_layers: int) -> Classifier:
    """Linear layers of one width."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise([64] + [width] * (hidden_layers + 1)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return Classifier([*layers, nn.Linear(width, 10)], learning_rate=0.01)


class ByteGPT(LightningModule):
    """A GPT over bytes."""

    def __init__(self, width: int, layers: int, heads: int, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        nn.init.normal_(self.token.weight, std=0.02)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of windows [B, CONTEXT + 1] of bytes, in nats per byte."""
        tokens = batch[0].long()
        x = self.token(tokens[:, :-1]) + self.position  # [B, T, C]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return cross_entropy(self.head(self.blocks(x, mask, is_causal=True)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)
