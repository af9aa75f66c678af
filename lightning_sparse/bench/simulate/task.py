"""What simulated ranks train: models, data and optimizers, none of it downloaded."""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_sparse.bench.compare.byte_lm import Task, byte_lm
from lightning_sparse.bench.compare.models import Classifier
from lightning_sparse.bench.compare.workloads import check_digits, handwritten_digits
from lightning_sparse.cli import names

WEIGHT_DECAY = 0.01
DIGITS = 1437  # of 1,797 to learn from
MODULES = 20  # classes
WINDOW = 64  # bytes, in one of which a module is to be recognised
NGRAM, BUCKETS = 4, 8192  # bytes of text that are hashed, and to what


def digits(seed: int) -> Task:
    """A convolutional network of 38,282 parameters for scikit-learn's handwritten digits."""
    check_digits("the task digits")
    torch.manual_seed(seed)
    images, labels = handwritten_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
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


@dataclass(frozen=True)
class Kind:
    """A kind of task, and how it is trained unless something else is asked for."""

    make: Callable[[int], Task]  # from a seed
    loss: str  # what its loss is
    optimizer: str  # a name in ``OPTIMIZERS``
    steps: int  # of a training
    rates: str  # largest learning rates to try


_MAKE = {
    "byte_lm": (byte_lm, "of a byte language model in nats a byte", "adamw"),
    "digits": (digits, "of a small network for handwritten digits", "sgd"),
    "modules": (modules, "of a bag of embeddings that tells modules apart", "adamw"),
}
#: Name -> kind of task.
TASKS = {name: Kind(*made, *names.TASKS[name]) for name, made in _MAKE.items()}


#: Name -> what makes the optimizer of a model.
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), weight_decay=WEIGHT_DECAY),
    "sgd": lambda model: SGD(model.parameters(), momentum=0.9),
}
