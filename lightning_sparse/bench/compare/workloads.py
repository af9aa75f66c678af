"""What a benchmark trains: models and data by name, or a user's own model.

Nothing is downloaded: the digits come with scikit-learn, the text is the source of Python's own standard library.
"""

import math
import os
import pkgutil
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparse.engine.ddp_checks import check_trains
from lightning_sparse.selection.streams import draw
from lightning_sparse_cli import MODEL_FORMS

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


class GPT(LightningModule):
    """A GPT over bytes, or over other tokens, of which it sees ``context``.

    ``tied``: it reads and writes tokens with the same weights.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        learning_rate: float = 5e-4,
        tokens: int = 256,
        context: int = CONTEXT,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.learning_rate, self.context = learning_rate, context
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        nn.init.normal_(self.token.weight, std=0.02)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        head = nn.Linear(width, tokens, bias=False)
        if tied:
            head.weight = self.token.weight
        self.head = nn.Sequential(nn.LayerNorm(width), head)

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of a batch of windows [B, context + 1] of tokens, in nats per token."""
        tokens = batch[0].long()
        x = self.token(tokens[:, :-1]) + self.position  # [B, T, C]
        mask = nn.Transformer.generate_square_subsequent_mask(self.context, device=x.device)
        return cross_entropy(self.head(self.blocks(x, mask, is_causal=True)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)


TEXT_BYTES = 2_000_000  # of source code that the larger models train on
HELD_OUT_WINDOWS = 64  # of source code after that, to judge them by
TASK_BYTES = 4_000_000  # of source code that byte_lm trains on
HELD_OUT = 20  # one file of the source code in so many is held out of byte_lm's
VALIDATION_WINDOWS = 640  # of these files, to validate byte_lm with
WARM_UP = 0.1  # of the steps; then the learning rate falls as a cosine, to 0
WARM_UP_STEPS = 60  # where nobody knows how many steps there will be; as for 600


def source_text(most_bytes: int, wanted: Callable[[int], bool] = lambda number: True) -> bytearray:
    """The standard library's modules one after the other, those whose number is ``wanted``."""
    text = bytearray()
    for number, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text += file.read_bytes() if wanted(number) else b""
        if len(text) >= most_bytes:
            break
    return text[:most_bytes]


def source_windows(most_bytes: int, wanted: Callable[[int], bool] = lambda number: True) -> Tensor:
    """Windows [N, CONTEXT + 1] of the bytes of :func:`source_text`."""
    return torch.frombuffer(source_text(most_bytes, wanted), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)


def other_source_code() -> Tensor:
    """Windows [HELD_OUT_WINDOWS, CONTEXT + 1] from all over the source code behind its first ``TEXT_BYTES``."""
    return _spread(source_windows(2 * TEXT_BYTES)[TEXT_BYTES // CONTEXT + 1 :], HELD_OUT_WINDOWS)


def _spread(windows: Tensor, count: int) -> Tensor:
    """So many of the windows, from all over them."""
    return windows[:: len(windows) // count][:count]


TOKENS, TOKEN_CONTEXT = 50_257, 1_024  # of gpt_124m: as many as GPT-2 has, of which it sees as many
HELD_OUT_OF_TOKENS = 16  # windows
_PIECE = re.compile(rb" ?\w+| ?[^\w\s]+|\s+")


@cache
def vocabulary() -> dict[bytes, int]:
    """Number of each token: the bytes, and the words, signs and spaces that the training text has more than once.

    Those are about 13,000 of the ``TOKENS``; of a longer text, the most frequent.
    """
    counts = Counter(_PIECE.findall(source_text(TEXT_BYTES))).most_common()
    pieces = [piece for piece, count in counts if count > 1 and len(piece) > 1]
    return {token: number for number, token in enumerate([*(bytes([byte]) for byte in range(256)), *pieces][:TOKENS])}


def token_windows(text: bytes | bytearray) -> Tensor:
    """Windows [N, TOKEN_CONTEXT + 1] of the tokens of ``text``, in which what has no number is spelt by its bytes."""
    known = vocabulary()
    numbers = [n for piece in _PIECE.findall(text) for n in ([known[piece]] if piece in known else piece)]
    return torch.tensor(numbers, dtype=torch.int32).unfold(0, TOKEN_CONTEXT + 1, TOKEN_CONTEXT)


def other_tokens() -> Tensor:
    """Windows [HELD_OUT_OF_TOKENS, TOKEN_CONTEXT + 1] of the same source code as :func:`other_source_code`."""
    return _spread(token_windows(source_text(2 * TEXT_BYTES)[TEXT_BYTES:]), HELD_OUT_OF_TOKENS)


@dataclass(frozen=True)
class Task:
    """What is trained: a model, and examples of each kind of data [N, ...]."""

    model: LightningModule  # whose ``training_step`` gives the loss of a batch
    training: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]  # that nobody learns from
    batch_size: int  # examples that a rank learns from in a step

    def batch(self, seed: int, step: int, rank: int) -> tuple[Tensor, ...]:
        """The examples that a rank learns from in a step."""
        generator = torch.Generator().manual_seed(draw(seed, step, rank))
        chosen = torch.randint(len(self.training[0]), (self.batch_size,), generator=generator)
        return tuple(kind[chosen] for kind in self.training)


def byte_lm(seed: int) -> Task:
    """A GPT of 279,168 parameters over the bytes of Python's standard library."""
    torch.manual_seed(seed)
    held_out = source_windows(TASK_BYTES, lambda number: number % HELD_OUT == 0)
    training = source_windows(TASK_BYTES, lambda number: number % HELD_OUT != 0)
    evenly = held_out[:: max(1, len(held_out) // VALIDATION_WINDOWS)]
    return Task(GPT(width=96, layers=2, heads=4), (training,), (evenly[:VALIDATION_WINDOWS],), 8)


class _Batches(IterableDataset[list[Tensor]]):
    """This rank's batches with a seed, without end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        task, rank = byte_lm(self._seed), dist.get_rank() if dist.is_initialized() else 0
        return (list(task.batch(self._seed, step, rank)) for step in count())


def batches() -> dict[str, Any]:
    """Make each rank's batches of windows [B, CONTEXT + 1] of bytes, by the seed that torch was given."""
    return {"train_dataloaders": DataLoader(_Batches(torch.initial_seed()), batch_size=None)}


def held_out() -> Tensor:
    """Every other of the windows [N, CONTEXT + 1] that simulations validate with, the same with any seed."""
    return byte_lm(torch.initial_seed()).validation[0][::2]  # whose loss is within 0.3 % of that of all


def learning_rate(peak: float, step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up to ``peak``, then a cosine to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step over the largest; where training ends by the clock, and ``steps`` is -1, it stays."""
    return learning_rate(1.0, step, steps) if steps > 0 else min(1.0, (step + 1) / WARM_UP_STEPS)


@dataclass(frozen=True)
class Workload:
    """A model and its data."""

    module: Callable[[], LightningModule]  # makes the model
    fit_arguments: Callable[[], dict[str, Any]]  # makes what `Trainer.fit` needs beside it, the same on every rank
    learns: bool = True  # whether the loss means anything
    needs_digits: bool = False  # whether its data are the handwritten digits
    held_out: Callable[[], Tensor] | None = None  # makes held-out data of that kind, [N, ...]
    schedule: Callable[[int, int], float] | None = None  # learning rate of a step, of so many or -1, over the largest
    precision: Any = "32-true"  # of the Trainer


def check_digits(what: str) -> None:
    """Raise a ModuleNotFoundError if the handwritten digits that ``what`` needs are not installed."""
    if find_spec("sklearn") is None:
        raise ModuleNotFoundError(
            f"{what} needs the package scikit-learn, which is not installed: pip install scikit-learn, or give another"
        )


def handwritten_digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits: images [N, 1, 8, 8] from 0 to 1 and labels [N]."""
    from sklearn.datasets import load_digits  # an extra

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.long)


def _digits() -> dict[str, Any]:
    return _loader(TensorDataset(*handwritten_digits()), batch_size=16)


def _source_code() -> dict[str, Any]:
    return _loader(TensorDataset(source_windows(TEXT_BYTES)), batch_size=4)


def _tokens() -> dict[str, Any]:
    return _loader(TensorDataset(token_windows(source_text(TEXT_BYTES))), batch_size=4)


def _loader(data: TensorDataset, batch_size: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(data, batch_size, shuffle=True, drop_last=True)}


#: Name -> workload.
WORKLOADS = {
    "mlp_1m": Workload(lambda: mlp(512, 4), _digits, needs_digits=True),
    "mlp_25m": Workload(lambda: mlp(2048, 6), _digits, needs_digits=True),
    "gpt_3m": Workload(
        lambda: GPT(192, 6, 6, learning_rate=2e-3),
        _source_code,
        held_out=other_source_code,
        schedule=schedule,
    ),
    "gpt_10m": Workload(lambda: GPT(384, 6, 6), _source_code, held_out=other_source_code),
    "gpt_50m": Workload(lambda: GPT(640, 10, 10), _source_code, held_out=other_source_code),
    "gpt_124m": Workload(  # GPT-2 small
        lambda: GPT(768, 12, 12, learning_rate=3e-4, tokens=TOKENS, context=TOKEN_CONTEXT, tied=True),
        _tokens,
        held_out=other_tokens,
        precision="bf16-mixed",
    ),
    "byte_lm": Workload(
        lambda: GPT(96, 2, 4, learning_rate=4e-3),
        batches,
        held_out=held_out,
        schedule=schedule,
    ),
}


def workload_named(name: str) -> Workload:
    """The workload called ``name``, or of a user's own model in one of the ``MODEL_FORMS``; a ValueError if none is."""
    if is_own(name):
        model, data = _load(name)
        _check_trains(name, model, data)
        return Workload(lambda: model, lambda: {"datamodule": data} if data is not None else {}, learns=False)
    if name.endswith((".py", ".ckpt", ".pt", ".pth")) or os.sep in name:
        module = ".".join(Path(os.path.relpath(name)).with_suffix("").parts)
        raise ValueError(
            f"a workload must be one of {', '.join(WORKLOADS)}, or {MODEL_FORMS}; got the path {name!r}. Give the "
            f"class by its module, as in '{module if name.endswith('.py') else 'module'}:Model', or a config file."
        )
    if name not in WORKLOADS:
        raise ValueError(f"a workload must be one of {', '.join(WORKLOADS)}, or {MODEL_FORMS}; got {name!r}")
    workload = WORKLOADS[name]
    if workload.needs_digits:
        check_digits(f"workload {name!r}")
    return workload


def count_parameters(workload: Workload) -> int:
    """Elements of all parameters; no memory is taken."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload.module().parameters())


def is_own(text: str) -> bool:
    """Whether ``text`` names a user's model and not a workload of the benchmark."""
    return ":" in text or text.endswith((".yaml", ".yml"))


def _load(text: str) -> tuple[LightningModule, LightningDataModule | None]:
    """The model, and its data if it does not bring them itself; raises a ValueError if ``text`` does not name one."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python does for a script
    if text.endswith((".yaml", ".yml")):
        return _from_config(text)
    model, *data = (_make(part) for part in text.split(",", 1))
    for made, kind in ((model, LightningModule), *((each, LightningDataModule) for each in data)):
        if not isinstance(made, kind):
            raise ValueError(f"model {text!r}: {type(made).__name__} is not a {kind.__name__}; give {MODEL_FORMS}.")
    return model, data[0] if data else None


def _check_trains(text: str, model: LightningModule, data: LightningDataModule | None) -> None:
    """Raise a ValueError for what a model lacks to be trained."""
    if not _overrides(model, "training_step"):
        raise ValueError(f"model {text!r} must have a training_step; got {type(model).__name__} without one.")
    if not _overrides(model, "configure_model"):
        check_trains(model, f"model {text!r}")
    if not any(made is not None and _overrides(made, "train_dataloader") for made in (data, model)):
        raise ValueError(
            f"model {text!r} must bring data, with a train_dataloader of its own or of a LightningDataModule; got "
            "none. Give 'package.module:Model,package.module:DataModule', or a config file with data."
        )


def _overrides(made: LightningModule | LightningDataModule, name: str) -> bool:
    """Whether ``made`` has a method of its own in the place of Lightning's."""
    kind = LightningModule if isinstance(made, LightningModule) else LightningDataModule
    return getattr(getattr(made, name), "__func__", None) is not getattr(kind, name)


def _make(path: str) -> Any:
    try:
        kind = pkgutil.resolve_name(path.strip())
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {path!r} cannot be imported ({error}); give {MODEL_FORMS}.") from error
    try:
        return kind()
    except TypeError as error:
        raise ValueError(f"model {path!r} cannot be made without arguments ({error}); give a config file.") from error


def _from_config(path: str) -> tuple[LightningModule, LightningDataModule | None]:
    if not Path(path).is_file():
        raise ValueError(f"config file {path!r} is not there; give {MODEL_FORMS}.")
    from lightning.pytorch.cli import LightningCLI

    given = ["--config", path, "--trainer.logger=false", "--trainer.strategy=auto", "--trainer.devices=1"]
    subclasses: Any = {"subclass_mode_model": True, "subclass_mode_data": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LightningCLI's, that args are not the command line's: so it is meant
            kinds = LightningModule, LightningDataModule
            cli = LightningCLI(*kinds, **subclasses, save_config_callback=None, run=False, args=given)
    except SystemExit as error:  # jsonargparse has said on standard error what is wrong
        raise ValueError(f"config file {path!r} does not describe a model; see above.") from error
    return cli.model, cli.datamodule
