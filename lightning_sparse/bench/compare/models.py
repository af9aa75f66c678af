"""Models that a benchmark trains, and the layers of well-known models with made-up gradients."""

import random
from collections.abc import Iterable, Iterator, Sequence
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
        """SGD with momentum."""
        return SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def mlp(width: int, hidden_layers: int) -> Classifier:
    """Linear layers of one width."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise([64] + [width] * (hidden_layers + 1)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return Classifier([*layers, nn.Linear(width, 10)], learning_rate=0.01)


def resnet() -> Classifier:
    """A residual network, with group norm: batch norm would send its buffers too."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1, bias=False)]
    for fan_in, fan_out in pairwise((64, 64, 128, 256)):
        layers += [_Residual(fan_in, fan_out), _Residual(fan_out, fan_out)]
    return Classifier([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)], learning_rate=0.05)


class _Residual(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        stride = fan_out // fan_in
        inner: list[nn.Module] = []
        for channels, step in ((fan_in, stride), (fan_out, 1)):
            convolution = nn.Conv2d(channels, fan_out, 3, step, padding=1, bias=False)
            inner += [nn.GroupNorm(8, channels), nn.ReLU(), convolution]
        self.inner = nn.Sequential(*inner)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.inner(x)
        return y


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
        """AdamW."""
        return AdamW(self.parameters(), lr=self.learning_rate)


# - gradients without a model


class GradientOnly(LightningModule):
    """Layers of a well-known model whose gradients are random normal numbers: real sizes, no forward.

    Gradients become ready one by one, the last parameter's first, as in a real backward; each costs a dot product and
    a copy.  Every element has the same scale, so what a compressor selects says nothing about learning.
    """

    STARTS = 2**20  # places in the pool of random numbers at which a gradient may start

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._pool: Tensor | None = None

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """A loss whose backward gives every parameter a random gradient."""
        del batch
        if self._pool is None:
            largest = max(parameter.numel() for parameter in self.parameters())
            self._pool = torch.randn(largest + self.STARTS, device=self.device)
        loss = torch.zeros((), device=self.device)
        for parameter in self.parameters():
            start = random.randrange(self.STARTS)
            loss = loss + parameter.view(-1).dot(self._pool[start : start + parameter.numel()])
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=1e-3)


def resnet50() -> Iterator[nn.Module]:
    """ResNet-50 for 1,000 classes."""
    yield from _convolution(3, 64, 7)
    channels = 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for block in range(blocks):
            yield from _convolution(channels, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, 4 * width, 1)
            if not block:
                yield from _convolution(channels, 4 * width, 1)
            channels = 4 * width
    yield nn.Linear(channels, 1000)


def densenet121() -> Iterator[nn.Module]:
    """DenseNet-121 for 1,000 classes: 8M parameters in 242 layers."""
    yield from _convolution(3, 64, 7)
    channels, growth = 64, 32
    for layers in (6, 12, 24, 16):
        if channels > 64:  # between blocks
            yield nn.Conv2d(channels, channels // 2, 1, bias=False)
            channels //= 2
        for _ in range(layers):
            yield nn.GroupNorm(1, channels)
            yield from _convolution(channels, 4 * growth, 1)
            yield nn.Conv2d(4 * growth, growth, 3, bias=False)
            channels += growth
        yield nn.GroupNorm(1, channels)
    yield nn.Linear(channels, 1000)


def vgg16() -> Iterator[nn.Module]:
    """VGG-16 for 1,000 classes."""
    for channels in pairwise((3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield nn.Conv2d(*channels, 3)
    for widths in pairwise((512 * 7 * 7, 4096, 4096, 1000)):
        yield nn.Linear(*widths)


def bert_base() -> Iterator[nn.Module]:
    """BERT-base, uncased, without a head."""
    yield from (nn.Embedding(rows, 768) for rows in (30522, 512, 2))
    yield nn.LayerNorm(768)
    yield from (nn.TransformerEncoderLayer(768, 12, 3072) for _ in range(12))
    yield nn.Linear(768, 768)


def gpt2() -> Iterator[nn.Module]:
    """GPT-2 small; its input and output embeddings are one parameter."""
    yield from (nn.Embedding(rows, 768) for rows in (50257, 1024))
    yield from (nn.TransformerEncoderLayer(768, 12, 3072) for _ in range(12))
    yield nn.LayerNorm(768)


def flat() -> Iterator[nn.Module]:
    """One parameter of 100 MB."""
    yield nn.Embedding(25_000_000, 1)


def _convolution(fan_in: int, fan_out: int, kernel: int) -> Iterator[nn.Module]:
    """A convolution, and a norm after it without buffers, which DDP would send."""
    yield nn.Conv2d(fan_in, fan_out, kernel, bias=False)
    yield nn.GroupNorm(1, fan_out)
