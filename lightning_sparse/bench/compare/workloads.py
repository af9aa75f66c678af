"""What a benchmark trains: models and data by name, or a user's own model.

Nothing is downloaded: the digits come with scikit-learn, the text is the source of Python's own standard library.
"""

import os
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.bench.compare import byte_lm
from lightning_sparse.bench.compare.models import ByteGPT, mlp
from lightning_sparse.cli.names import MODEL_FORMS
from lightning_sparse.engine.ddp_checks import check_trains


@dataclass(frozen=True)
class Workload:
    """A model and its data."""

    module: Callable[[], LightningModule]  # makes the model
    fit_arguments: Callable[[], dict[str, Any]]  # makes what `Trainer.fit` needs beside it, the same on every rank
    learns: bool = True  # whether the loss means anything
    needs_digits: bool = False  # whether its data are the handwritten digits
    held_out: Callable[[], Tensor] | None = None  # makes held-out data of that kind, [N, ...]
    schedule: Callable[[int, int], float] | None = None  # learning rate of a step, of so many or -1, over the largest


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
    return _loader(TensorDataset(byte_lm.source_windows(byte_lm.TEXT_BYTES)), batch_size=4)


def _loader(data: TensorDataset, batch_size: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(data, batch_size, shuffle=True, drop_last=True)}


#: Name -> workload.
WORKLOADS = {
    "mlp_1m": Workload(lambda: mlp(512, 4), _digits, needs_digits=True),
    "mlp_25m": Workload(lambda: mlp(2048, 6), _digits, needs_digits=True),
    "gpt_3m": Workload(
        lambda: ByteGPT(192, 6, 6, learning_rate=2e-3),
        _source_code,
        held_out=byte_lm.other_source_code,
        schedule=byte_lm.schedule,
    ),
    "gpt_10m": Workload(lambda: ByteGPT(384, 6, 6), _source_code, held_out=byte_lm.other_source_code),
    "gpt_50m": Workload(lambda: ByteGPT(640, 10, 10), _source_code, held_out=byte_lm.other_source_code),
    "byte_lm": Workload(
        lambda: ByteGPT(96, 2, 4, learning_rate=4e-3),
        byte_lm.batches,
        held_out=byte_lm.held_out,
        schedule=byte_lm.schedule,
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
