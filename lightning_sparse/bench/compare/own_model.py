"""A user's own model as a workload: by import path, or as a LightningCLI config file describes it."""

import os
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

FORMS = "'package.module:Model', 'package.module:Model,package.module:DataModule' or a config file 'config.yaml'"


def is_own(text: str) -> bool:
    """Whether ``text`` names a user's model and not a workload of the benchmark."""
    return ":" in text or text.endswith((".yaml", ".yml"))


def load(text: str) -> tuple[LightningModule, LightningDataModule | None]:
    """The model, and its data if it does not bring them itself; raises a ValueError if ``text`` does not name one."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python does for a script
    if text.endswith((".yaml", ".yml")):
        return _from_config(text)
    model, *data = (_make(part) for part in text.split(",", 1))
    for made, kind in ((model, LightningModule), *((each, LightningDataModule) for each in data)):
        if not isinstance(made, kind):
            raise ValueError(f"model {text!r}: {type(made).__name__} is not a {kind.__name__}; give {FORMS}.")
    return model, data[0] if data else None


def _make(path: str) -> Any:
    try:
        kind = pkgutil.resolve_name(path.strip())
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {path!r} cannot be imported ({error}); give {FORMS}.") from error
    try:
        return kind()
    except TypeError as error:
        raise ValueError(f"model {path!r} cannot be made without arguments ({error}); give a config file.") from error


def _from_config(path: str) -> tuple[LightningModule, LightningDataModule | None]:
    if not Path(path).is_file():
        raise ValueError(f"config file {path!r} is not there; give {FORMS}.")
    from lightning.pytorch.cli import LightningCLI

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LightningCLI's, that args are not the command line's: so it is meant
            cli = LightningCLI(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=None,
                run=False,
                args=["--config", path, "--trainer.logger=false", "--trainer.strategy=auto", "--trainer.devices=1"],
            )
    except SystemExit as error:  # jsonargparse has said on standard error what is wrong
        raise ValueError(f"config file {path!r} does not describe a model; see above.") from error
    return cli.model, cli.datamodule
