"""What simulated ranks train: models and data, none of it downloaded."""

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparse.bench.compare.text import source_windows
from lightning_sparse.bench.compare.workloads import ByteGPT, Classifier
from lightning_sparse.selection.streams import draw

HELD_OUT = 20  # one file of the text in so many is validated with
TEXT_BYTES = 4_000_000  # to learn from
VALIDATION_WINDOWS = 640

DIGITS = 1437  # of 1,797 to learn from

MODULES = 20  # classes
WINDOW = 64  # bytes, in one of which a module is to be recognised
NGRAM, BUCKETS = 4, 8192  # bytes of text that are hashed, and to what


def loss_of(model: LightningModule, batch: Sequence[Tensor]) -> Tensor:
    """The loss of a batch."""
    loss = model.training_step(batch)
    assert isinstance(loss, Tensor)
    return loss


@dataclass(frozen=True)
class Task:
    """What is trained: a model, and examples of each kind of data [N, ...].

    Args:
        model: whose ``training_step`` gives the loss of a batch.
        training: examples to learn from.
        validation: examples that nobody learns from.
        batch_size: examples that a rank learns from in a step.
    """

    model: LightningModule
    training: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    batch_size: int

    def batch(self, seed: int, step: int, rank: int) -> tuple[Tensor, ...]:
        """The examples that a rank learns from in a step."""
        generator = torch.Generator().manual_seed(draw(seed, step, rank))
        chosen = torch.randint(len(self.training[0]), (self.batch_size,), generator=generator)
        return tuple(kind[chosen] for kind in self.training)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss of examples that nobody learns from."""
        parts = list(zip(*(kind.split(128) for kind in self.validation), strict=True))
        losses = [float(loss_of(self.model, part)) * len(part[0]) for part in parts]
        return sum(losses) / len(self.validation[0])

    @torch.no_grad()
    def accuracy(self) -> float | None:
        """The part of those examples that is classified as it should be; None where nothing is classified."""
        if not isinstance(self.model, Classifier):
            return None
        examples, classes = self.validation
        return float((self.model.layers(examples).argmax(1) == classes).float().mean())


@dataclass(frozen=True)
class Kind:
    """A kind of task, and how it is trained unless something else is asked for.

    Args:
        make: makes the task from a seed.
        loss: says what its loss is.
        optimizer: a name in ``OPTIMIZERS``.
        rates: largest learning rates to try.
        steps: of a training.
    """

    make: Callable[[int], Task]
    loss: str
    optimizer: str
    rates: str
    steps: int


def byte_lm(seed: int) -> Task:
    """A GPT of 279,168 parameters over the bytes of Python's standard library."""
    torch.manual_seed(seed)
    held_out = source_windows(TEXT_BYTES, lambda number: number % HELD_OUT == 0)
    training = source_windows(TEXT_BYTES, lambda number: number % HELD_OUT != 0)
    evenly = held_out[:: max(1, len(held_out) // VALIDATION_WINDOWS)]
    return Task(ByteGPT(width=96, layers=2, heads=4), (training,), (evenly[:VALIDATION_WINDOWS],), 8)


def digits(seed: int) -> Task:
    """A convolutional network of 38,282 parameters for scikit-learn's handwritten digits.

    Raises:
        ModuleNotFoundError: without scikit-learn.
    """
    if find_spec("sklearn") is None:
        raise ModuleNotFoundError(
            "the task digits needs scikit-learn, which is not installed: pip install scikit-learn, or "
            "give another --task"
        )
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images[order] / 16, dtype=torch.float32)[:, None]  # [N, 1, 8, 8], from 0 to 1
    labels = torch.tensor(found.target[order])
    layers = [
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    ]
    model = Classifier(layers, learning_rate=0.1)
    return Task(model, (images[:DIGITS], labels[:DIGITS]), (images[DIGITS:], labels[DIGITS:]), 4)


def modules(seed: int) -> Task:
    """A bag of embeddings, 262,804 parameters, that says which of Python's 20 largest modules 64 bytes are from."""
    torch.manual_seed(seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda file: (-file.stat().st_size, file))
    texts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files[:MODULES]]
    windows = [text.unfold(0, WINDOW, WINDOW) for text in texts]
    labels = torch.arange(MODULES).repeat_interleave(torch.tensor([len(each) for each in windows]))
    grams = torch.cat(windows).long().unfold(1, NGRAM, 1)  # [N, WINDOW - NGRAM + 1, NGRAM]
    hashes = ((grams * torch.tensor([31**i for i in range(NGRAM)])).sum(2) * 2654435761 >> 12) % BUCKETS
    held_out = torch.arange(len(labels)) % 10 == 0
    bag = nn.EmbeddingBag(BUCKETS, 32, mode="sum")
    nn.init.normal_(bag.weight, std=0.02)
    model = Classifier([bag, nn.Linear(32, MODULES)], learning_rate=1e-2)
    return Task(model, (hashes[~held_out], labels[~held_out]), (hashes[held_out], labels[held_out]), 16)


#: Name -> kind of task.
TASKS = {
    "byte_lm": Kind(byte_lm, "of a byte language model in nats a byte", "adamw", "2e-3,4e-3,8e-3", 600),
    "digits": Kind(digits, "of a small network for handwritten digits", "sgd", "0.02,0.05,0.1", 300),
    "modules": Kind(modules, "of a bag of embeddings that tells modules apart", "adamw", "5e-3,1e-2,2e-2", 300),
}
