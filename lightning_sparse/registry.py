"""Makes the names known to Lightning."""

from importlib.util import find_spec
from itertools import product
from typing import Any, NoReturn

from lightning_sparse.auto.policy import NAMES, Auto, by_name
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import OPTIONS
from lightning_sparse.compressors.named import did_you_mean


def register() -> None:
    """Register the names for ``Trainer`` and ``Fabric`` with every installed Lightning package.

    Done when :mod:`lightning_sparse` is imported; may be repeated.
    """
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.strategy import Strategy as FabricsStrategy
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    from lightning_sparse import fabric
    from lightning_sparse.trainer.hsdp import SparseHSDPStrategy
    from lightning_sparse.trainer.strategy import SparseDDPStrategy

    _register_names(StrategyRegistry, SparseDDPStrategy)
    _register_sharded(StrategyRegistry, SparseHSDPStrategy)
    _register_names(STRATEGY_REGISTRY, fabric.SparseDDPStrategy)
    for trainers in (SparseDDPStrategy, SparseHSDPStrategy):
        _explain(trainers, FabricsStrategy, "_precision", FOR_FABRIC.format(name=trainers.__name__))
    for fabrics in (fabric.SparseDDPStrategy, fabric.SparseHSDPStrategy):
        _explain(fabrics, Strategy, "_precision_plugin", FOR_A_TRAINER.format(name=fabrics.__name__))
    for kind in (Compressor, Auto):
        for asked in (FabricsStrategy, Strategy):
            _explain(kind, asked, "_accelerator", NO_STRATEGY)
    if find_spec("pytorch_lightning") is None:
        return
    from pytorch_lightning.strategies import Strategy as OtherStrategy
    from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

    from lightning_sparse import pytorch_lightning as other

    _register_names(OtherRegistry, other.SparseDDPStrategy)
    _register_sharded(OtherRegistry, other.SparseHSDPStrategy)
    # A strategy given to the other package's Trainer would be refused as "an invalid strategy name".  As a virtual
    # subclass it passes that check, and then says itself what is wrong (SparseMixin.set_world_ranks).
    OtherStrategy.register(SparseDDPStrategy)
    Strategy.register(other.SparseDDPStrategy)
    for kind in (Compressor, Auto):
        _explain(kind, OtherStrategy, "_accelerator", NO_STRATEGY)


FOR_FABRIC = (
    "strategy must be one for Fabric; got lightning_sparse.{name}, which is for a Trainer. With Fabric use "
    "lightning_sparse.fabric.{name}, which takes the same options but for residuals."
)
FOR_A_TRAINER = (
    "strategy must be one for a Trainer; got lightning_sparse.fabric.{name}, which is for Fabric. With a Trainer use "
    "lightning_sparse.{name}, which takes the same options, and residuals."
)
NO_STRATEGY = (
    "strategy must be a strategy, or a name of one; got the compressor {given}. Write SparseDDPStrategy({given})."
)


class Names(list[str]):
    """The names of a registry, in which Lightning looks for a strategy before it calls it "an invalid strategy name".

    What is none, but is meant for one of ours, is refused with what was meant.
    """

    def __contains__(self, given: object) -> bool:
        if super().__contains__(given):
            return True
        if isinstance(given, type) and issubclass(given, Compressor | Auto):
            raise TypeError(
                f"strategy must be a strategy, or a name of one; got the class {given.__name__}. Write "
                f"SparseDDPStrategy({given.__name__}())."
            )
        if isinstance(given, type) and hasattr(given, "setup_environment"):
            raise TypeError(
                f"strategy must be an instance, or a name; got the class {given.__name__}. Write {given.__name__}(...)."
            )
        if isinstance(given, str) and given in OPTIONS:
            by_name(given)
        if isinstance(given, str) and (meant := did_you_mean(given, NAMES)):
            raise ValueError(
                f"strategy must be a name that Lightning knows, or an instance; got {given!r}.{meant} Names take no "
                "settings: for those write SparseDDPStrategy(MiCRO(density=0.1)), say."
            )
        return False


class NoStrategy(TypeError, AttributeError):
    """What is no strategy was given as one; ``hasattr`` answers that it has no such attribute."""


def _explain(kind: type, asked: Any, first: str, text: str) -> None:
    """Have what is no strategy of the kind ``asked`` for say so itself, in place of "an invalid strategy name".

    As a virtual subclass it passes Lightning's check; ``first`` is what Lightning then looks for, and ``kind`` lacks.
    """

    def refuse(given: object) -> NoReturn:
        raise NoStrategy(text.format(given=repr(given)))

    setattr(kind, first, property(refuse))
    asked.register(kind)


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
    registry.available_strategies = lambda: Names(registry)


def _register_sharded(registry: Any, strategy: type) -> None:
    """Register "sparse_hsdp", and for each compressor its name with "_hsdp" behind it."""
    for name in ("sparse", *NAMES):
        given = {} if name == "sparse" else {"compressor": name}
        described = f"FSDP2 inside nodes, {given.get('compressor', 'sparse_auto')} between them."
        registry.register(f"{name}_hsdp", strategy, description=described, override=True, **given)
