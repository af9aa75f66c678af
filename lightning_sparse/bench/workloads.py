"""What is trained in a benchmark: real models on real data, and the layer shapes of well-known models.

Nothing is downloaded: the digits come with scikit-learn, the text is the source of Python's own standard library.
"""

import math
import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sparse.bench import own_model

Shapes = dict[str, tuple[int, ...]]  # parameter name -> shape, in the order of the forward pass

TEXT_BYTES = 2_000_000  # of source code that the byte models train on
CONTEXT = 64  # bytes a byte model sees


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        summary: one line for people.
        module: makes the model.
        data: makes the data, the same on every rank; each rank takes its share.
        batch_size: samples of one rank in a step.
        needs: an importable package without which the data cannot be made, or "".
        learns: whether the loss means anything.
        feed: makes what ``Trainer.fit`` needs beside the module, in place of ``data`` and ``batch_size``.
    """

    summary: str
    module: Callable[[], LightningModule]
    data: Callable[[], Dataset[Any]]
    batch_size: int
    needs: str = ""
    learns: bool = True
    feed: Callable[[], dict[str, Any]] | None = None

    def fit_arguments(self) -> dict[str, Any]:
        """What ``Trainer.fit`` needs beside the module."""
        if self.feed is not None:
            return self.feed()
        return {"train_dataloaders": DataLoader(self.data(), self.batch_size, shuffle=True, drop_last=True)}


# - models


class MLP(LightningModule):
    """Images of digits through linear layers of one width."""

    def __init__(self, width: int, hidden_layers: int) -> None:
        super().__init__()
        widths = [64] + [width] * (hidden_layers + 1)
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            linear = nn.Linear(fan_in, fan_out)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers += [linear, nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of images [B, 1, 8, 8] and labels [B]."""
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(self.parameters(), lr=0.01, momentum=0.9)


class ResNet(LightningModule):
    """A residual network for images of 8 x 8, with group norm: batch norm would send its buffers too."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256), blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False)]
        channels = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(_Residual(channels, width, stride=2 if stage and not block else 1))
                channels = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of images [B, 1, 8, 8] and labels [B]."""
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> Optimizer:
        """SGD with momentum."""
        return SGD(self.parameters(), lr=0.05, momentum=0.9)


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.inner(x)
        return y


class ByteGPT(LightningModule):
    """A GPT over bytes."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of windows [B, CONTEXT + 1] of bytes, in nats per byte."""
        tokens = batch[0].long()
        x = self.token(tokens[:, :-1]) + self.position  # [B, T, C]
        return cross_entropy(self.head(self.blocks(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        """AdamW."""
        return AdamW(self.parameters(), lr=5e-4)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, C / H]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(x)
        return y


# - data


def digits() -> Dataset[Any]:
    """1,797 handwritten digits: images [1, 8, 8] from 0 to 1 and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.long)
    )


def source_code() -> Dataset[Any]:
    """Windows [CONTEXT + 1] of the bytes of the standard library."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]
    return TensorDataset(tokens.unfold(0, CONTEXT + 1, CONTEXT))


def nothing() -> Dataset[Any]:
    """Zeros, for models that look at no data."""
    return TensorDataset(torch.zeros(4096))


# - gradients without a model


class GradientOnly(LightningModule):
    """Parameters of given shapes whose gradients are random normal numbers: real sizes, no forward.

    Gradients become ready one by one, the last parameter's first, as in a real backward, and each costs one copy.
    Every element has the same scale, so what a compressor picks says nothing about learning.
    """

    POOL = 2**22  # elements drawn once; a gradient is a piece of them that starts at a random place

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            path, _, last = name.rpartition(".")
            _submodule(self, path).register_parameter(last, nn.Parameter(torch.zeros(shape)))
        self._pool: Tensor | None = None

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """A loss of zero whose backward gives every parameter a random gradient."""
        del batch
        if self._pool is None:
            self._pool = torch.randn(self.POOL, device=self.device)
        loss = torch.zeros((), device=self.device)
        for parameter in self.parameters():
            loss = _GiveGradient.apply(loss, parameter, self._pool)  # type: ignore[no-untyped-call]
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=1e-3)


class _GiveGradient(torch.autograd.Function):
    """Passes its first argument on, and gives its second a random gradient."""

    @staticmethod
    def forward(ctx: Any, passing: Tensor, parameter: Tensor, pool: Tensor) -> Tensor:
        ctx.shape, ctx.pool = parameter.shape, pool
        return passing.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], _piece(ctx.pool, math.prod(ctx.shape)).view(ctx.shape), None


def _piece(pool: Tensor, elements: int) -> Tensor:
    """A copy of ``elements`` neighbours of the pool, which goes on from its start when it ends."""
    if elements > pool.numel():
        start = random.randrange(pool.numel())
        return pool.repeat(-(-(start + elements) // pool.numel()))[start : start + elements]
    start = random.randrange(pool.numel() - elements + 1)
    return pool[start : start + elements].clone()


def _submodule(module: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    return module


def resnet50_shapes() -> Shapes:
    """ResNet-50 for 1,000 classes."""
    shapes = {**_convolution("conv1", 64, 3, 7), **_norm("bn1", 64)}
    channels = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            sizes = ((width, channels, 1), (width, width, 3), (4 * width, width, 1))
            for i, (fan_out, fan_in, kernel) in enumerate(sizes, start=1):
                shapes |= _convolution(f"{at}.conv{i}", fan_out, fan_in, kernel) | _norm(f"{at}.bn{i}", fan_out)
            if not block:
                shapes |= _convolution(f"{at}.downsample.0", 4 * width, channels, 1)
                shapes |= _norm(f"{at}.downsample.1", 4 * width)
            channels = 4 * width
    return shapes | _linear("fc", 1000, channels)


def densenet121_shapes() -> Shapes:
    """DenseNet-121 for 1,000 classes: 8M parameters in 242 layers."""
    shapes = {**_convolution("conv0", 64, 3, 7), **_norm("norm0", 64)}
    channels, growth = 64, 32
    for block, layers in enumerate((6, 12, 24, 16), start=1):
        for layer in range(layers):
            at = f"block{block}.{layer}"
            shapes |= _norm(f"{at}.norm1", channels) | _convolution(f"{at}.conv1", 4 * growth, channels, 1)
            shapes |= _norm(f"{at}.norm2", 4 * growth) | _convolution(f"{at}.conv2", growth, 4 * growth, 3)
            channels += growth
        shapes |= _norm(f"transition{block}.norm", channels)
        if block < 4:
            shapes |= _convolution(f"transition{block}.conv", channels // 2, channels, 1)
            channels //= 2
    return shapes | _linear("classifier", 1000, channels)


def vgg16_shapes() -> Shapes:
    """VGG-16 for 1,000 classes."""
    shapes: Shapes = {}
    channels = 3
    for i, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        shapes |= _convolution(f"features.{i}", width, channels, 3) | {f"features.{i}.bias": (width,)}
        channels = width
    for i, (fan_out, fan_in) in enumerate(((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096))):
        shapes |= _linear(f"classifier.{i}", fan_out, fan_in)
    return shapes


def bert_base_shapes() -> Shapes:
    """BERT-base, uncased, without a head."""
    shapes: Shapes = {}
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        shapes[f"embeddings.{name}.weight"] = (rows, 768)
    shapes |= _norm("embeddings.norm", 768)
    for i in range(12):
        for name in ("query", "key", "value", "output"):
            shapes |= _linear(f"layer.{i}.attention.{name}", 768, 768)
        shapes |= _norm(f"layer.{i}.attention.norm", 768)
        shapes |= _linear(f"layer.{i}.up", 3072, 768) | _linear(f"layer.{i}.down", 768, 3072)
        shapes |= _norm(f"layer.{i}.norm", 768)
    return shapes | _linear("pooler", 768, 768)


def gpt2_shapes() -> Shapes:
    """GPT-2 small; its input and output embeddings are one parameter."""
    shapes: Shapes = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    for i in range(12):
        shapes |= _norm(f"h.{i}.ln_1", 768) | _linear(f"h.{i}.attn.c_attn", 2304, 768)
        shapes |= _linear(f"h.{i}.attn.c_proj", 768, 768) | _norm(f"h.{i}.ln_2", 768)
        shapes |= _linear(f"h.{i}.mlp.c_fc", 3072, 768) | _linear(f"h.{i}.mlp.c_proj", 768, 3072)
    return shapes | _norm("ln_f", 768)


def _convolution(name: str, fan_out: int, fan_in: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (fan_out, fan_in, kernel, kernel)}


def _linear(name: str, fan_out: int, fan_in: int) -> Shapes:
    return {f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


# - by name


def _on_digits(summary: str, module: Callable[[], LightningModule]) -> Workload:
    return Workload(summary, module, digits, batch_size=16, needs="sklearn")


def _on_text(summary: str, module: Callable[[], LightningModule]) -> Workload:
    return Workload(summary, module, source_code, batch_size=4)


def _gradients(summary: str, shapes: Callable[[], Shapes]) -> Workload:
    return Workload(f"{summary}, gradients only", lambda: GradientOnly(shapes()), nothing, batch_size=1, learns=False)


#: Name -> workload.
WORKLOADS = {
    "mlp_1m": _on_digits("MLP of 1.1M parameters on digits, for a first try", lambda: MLP(512, 4)),
    "mlp_25m": _on_digits("MLP of 25M parameters on digits", lambda: MLP(2048, 6)),
    "gpt_10m": _on_text("GPT of 11M parameters on bytes of source code", lambda: ByteGPT(384, 6, 6)),
    "gpt_50m": _on_text("GPT of 50M parameters on bytes of source code", lambda: ByteGPT(640, 10, 10)),
    "resnet_digits": _on_digits("residual network of 2.8M parameters on digits", ResNet),
    "resnet50_shapes": _gradients("ResNet-50, 25.6M parameters", resnet50_shapes),
    "densenet121_shapes": _gradients("DenseNet-121, 8M parameters in 242 layers", densenet121_shapes),
    "vgg16_shapes": _gradients("VGG-16, 138M parameters", vgg16_shapes),
    "bert_base_shapes": _gradients("BERT-base, 109M parameters", bert_base_shapes),
    "gpt2_shapes": _gradients("GPT-2 small, 124M parameters", gpt2_shapes),
    "flat_100mb": _gradients("one parameter of 100 MB", lambda: {"flat": (25_000_000,)}),
}


def workload_named(name: str) -> Workload:
    """The workload called ``name``, or of a user's own model in one of the forms of ``own_model.FORMS``.

    Raises:
        ValueError: there is none, or a package it needs is not installed.
    """
    if own_model.is_own(name):
        return _own(name)
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is not one of {', '.join(WORKLOADS)}.")
    workload = WORKLOADS[name]
    if workload.needs and find_spec(workload.needs) is None:
        raise ValueError(
            f"workload {name!r} needs the package {workload.needs!r}, which is not installed: "
            "pip install lightning-sparse[bench]"
        )
    return workload


def _own(text: str) -> Workload:
    model, data = own_model.load(text)
    feed = {"datamodule": data} if data is not None else {}
    return Workload(text, lambda: model, nothing, batch_size=1, learns=False, feed=lambda: feed)


def parameter_sizes(workload: Workload) -> list[int]:
    """Elements of each parameter; no memory is taken."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in workload.module().parameters()]
