"""Makes the names known to Lightning."""

from importlib.util import find_spec


def register() -> None:
    """Register the names for ``Trainer`` and ``Fabric`` with every installed Lightning package.

    Done when :mod:`lightning_sparse` is imported; may be repeated.
    """
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy
    from lightning_sparse.strategy import SparseDDPStrategy

    SparseDDPStrategy.register_strategies(StrategyRegistry)
    FabricStrategy.register_strategies(STRATEGY_REGISTRY)
    if find_spec("pytorch_lightning") is None:
        return
    from pytorch_lightning.strategies import Strategy as OtherStrategy
    from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

    from lightning_sparse import pytorch_lightning as other

    other.SparseDDPStrategy.register_strategies(OtherRegistry)
    # A strategy given to the other package's Trainer would be refused as "an invalid strategy name".  As a virtual
    # subclass it passes that check, and then says itself what is wrong (SparseMixin.accelerator).
    OtherStrategy.register(SparseDDPStrategy)
    Strategy.register(other.SparseDDPStrategy)
