"""Makes the names known to Lightning."""

from importlib.util import find_spec
from itertools import product
from typing import Any

from lightning_sparse.auto.policy import NAMES


def register() -> None:
    """Register the names for ``Trainer`` and ``Fabric`` with every installed Lightning package.

    Done when :mod:`lightning_sparse` is imported; may be repeated.
    """
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_sparse import fabric
    from lightning_sparse.trainer.hsdp import SparseHSDPStrategy
    from lightning_sparse.trainer.strategy import SparseDDPStrategy

    _register_names(StrategyRegistry, SparseDDPStrategy)
    _register_sharded(StrategyRegistry, SparseHSDPStrategy)
    _register_names(STRATEGY_REGISTRY, fabric.SparseDDPStrategy)
    if find_spec("pytorch_lightning") is None:
        return
    from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

    from lightning_sparse import pytorch_lightning as other

    _register_names(OtherRegistry, other.SparseDDPStrategy)
    _register_sharded(OtherRegistry, other.SparseHSDPStrategy)


def _register_names(registry: Any, strategy: type) -> None:
    """Register a name of ``strategy`` for each compressor, with the variants of DDP's names.

    Each also with "ddp_" in front: other packages look for "ddp" in it to know that ranks share the data.
    """
    starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for name, compressor in NAMES.items():
        summary = (compressor.__doc__ or "").strip().partition("\n")[0]
        for prefix, (suffix, start_method), unused in product(("", "ddp_"), starts.items(), (False, True)):
            registry.register(
                prefix + name + suffix + ("_find_unused_parameters_true" if unused else ""),
                strategy,
                description=f"{summary} Start method {start_method!r}.",
                override=True,
                compressor=name,
                start_method=start_method,
                **({"find_unused_parameters": True} if unused else {}),
            )


def _register_sharded(registry: Any, strategy: type) -> None:
    """Register "sparse_hsdp", and for each compressor its name with "_hsdp" behind it."""
    for name in ("sparse", *NAMES):
        given = {} if name == "sparse" else {"compressor": name}
        described = f"FSDP2 inside nodes, {given.get('compressor', 'sparse_auto')} between them."
        registry.register(f"{name}_hsdp", strategy, description=described, override=True, **given)
