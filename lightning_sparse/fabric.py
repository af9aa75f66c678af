"""The strategy for ``lightning.fabric.Fabric``."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.auto.policy import Auto
from lightning_sparse.compressors import Compressor
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.members import AUTO
from lightning_sparse.network.process_groups import have_devices_keep_order
from lightning_sparse.options import Options
from lightning_sparse.sharded.model import ShardedModel
from lightning_sparse.sharded_hook import ShardedHook, options_of
from lightning_sparse.trainer.hsdp import OnMesh

Hook = TypeVar("Hook", bound=SparseHook)


class _Hooked(Strategy, Generic[Hook]):
    """The part that strategies have in common, beside one of Fabric's own."""

    _hooks: list[weakref.ref[Hook]]

    @property
    def hooks(self) -> list[Hook]:
        """Hooks of the modules that were set up and are still in use, in the order of setup."""
        return [hook for each in self._hooks if (hook := each()) is not None]

    def setup_environment(self) -> None:
        have_devices_keep_order()
        super().setup_environment()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save; with ``local_steps`` the average of the members."""
        for hook in self.hooks:
            hook.show_average()
        super().save_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        for hook in self.hooks:
            hook.close()
        super().teardown()


class SparseDDPStrategy(_Hooked[SparseHook], DDPStrategy):
    """:class:`lightning_sparse.SparseDDPStrategy` for ``Fabric``: ``Fabric(strategy="micro")``, or an instance.

    Every module that ``fabric.setup`` wraps gets a :class:`~lightning_sparse.SparseHook`, which is in ``hooks`` as long
    as the module is in use.  Fabric saves what it is given, so name the hook to keep what is unsent:
    ``fabric.save(path, {"model": model, "unsent": hook})``, on every rank.

    Args:
        compressor: what averages, as for the Trainer's strategy; and so the others.
        fusion: which parameters travel together.
        wire_dtype: of values on the wire; None: as the compressor has it by default.
        warmup_steps: steps in which all elements are sent first, in ``wire_dtype``.
        local_group: ranks that act as one.
        local_steps: H, optimizer steps of each rank between two averages of the same weight.
        exact: patterns of names of parameters that are summed in float32.
        **kwargs: everything ``lightning.fabric.strategies.DDPStrategy`` takes.

    Raises:
        ValueError: for an option out of range, with the value and what is allowed.
        TypeError: if ``compressor`` is neither a name nor an instance, or for a keyword that nobody takes.
    """

    def __init__(
        self,
        compressor: Compressor | Auto | str = "sparse_auto",
        fusion: str | Sequence[str] = "layer",
        wire_dtype: str | None = None,
        warmup_steps: int = 0,
        local_group: int | str = AUTO,
        local_steps: int | LocalSteps = 0,
        exact: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        options = Options.of(
            compressor,
            fusion,
            wire_dtype=wire_dtype,
            warmup_steps=warmup_steps,
            local_group=local_group,
            local_steps=local_steps,
            exact=exact,
        )
        self.options, kwargs = options.beside_ddp(kwargs, super().__init__)
        super().__init__(**kwargs)
        self._hooks: list[weakref.ref[SparseHook]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.brief()})"

    def setup_module(self, module: Module) -> DistributedDataParallel:
        scaler = getattr(self.precision, "scaler", None)
        ddp, hook = SparseHook.around(self, module, scaler, partial(super().setup_module, module))
        for known in self._optimizers:
            if (optimizer := known()) is not None:
                hook.note(optimizer)
        self._hooks.append(weakref.ref(hook))
        return ddp

    def evaluates(self, module: Module) -> bool:
        """Whether a forward of ``module`` is one of an evaluation: where it is in evaluation mode."""
        return not module.training

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer, and note it: with ``local_steps`` its state differs between ranks."""
        self._optimizers.append(weakref.ref(optimizer))
        for hook in self.hooks:
            hook.note(optimizer)
        return super().setup_optimizer(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load; hooks after all else, since they know what of an optimizer's state is each rank's own."""
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        in_order = dict(sorted(state.items(), key=lambda item: isinstance(item[1], SparseHook)))
        rest = super().load_checkpoint(path, in_order, *args, **kwargs)
        state.update(in_order)
        return rest


class SparseHSDPStrategy(OnMesh, _Hooked[ShardedHook], ModelParallelStrategy):
    """:class:`lightning_sparse.SparseHSDPStrategy` for ``Fabric``.

    Every module that ``fabric.setup`` shards gets a hook, which is in ``hooks`` as long as the module is in use.  To
    keep what is unsent name it: ``fabric.save(path, {"model": model, "unsent": hook})``, on every rank.

    Args:
        parallelize_fn: takes a module and the mesh, and returns the module after
            ``fully_shard(..., mesh=mesh["shard"])`` of its parts and at last of itself.
        compressor: what averages, as for the Trainer's strategy; and so the others.
        wire_dtype: of values between nodes; None: as the compressor has it by default.
        warmup_steps: steps in which all elements are sent first, in ``wire_dtype``.
        replicate_size: R; "auto": the nodes.
        shard_size: S; "auto": the devices of a node.
        local_steps: H, optimizer steps of each replica between two averages of the same weight.
        exact: patterns of names of parameters that are summed in float32.
        **kwargs: everything else that ``lightning.fabric.strategies.ModelParallelStrategy`` takes.

    Raises:
        ValueError: for an option out of range, or a model that is not sharded so.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        compressor: Compressor | Auto | str = "sparse_auto",
        wire_dtype: str | None = None,
        warmup_steps: int = 0,
        replicate_size: int | Literal["auto"] = "auto",
        shard_size: int | Literal["auto"] = "auto",
        local_steps: int | LocalSteps = 0,
        exact: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.options = options_of(compressor, wire_dtype, warmup_steps, local_steps=local_steps, exact=exact)
        self._set_sizes(replicate_size, shard_size)
        super().__init__(parallelize_fn, **kwargs)
        self._hooks: list[weakref.ref[ShardedHook]] = []

    def setup_module(self, module: Module) -> Module:
        module = super().setup_module(module)
        if not any(p.requires_grad for p in module.parameters()):
            return module  # nothing to average
        hook = ShardedHook(ShardedModel(module, self.device_mesh), self.options, self._timeout)
        module.register_forward_pre_hook(lambda *_: hook.begin_forward(), prepend=True)
        module.register_forward_hook(lambda *_: hook.end_forward(), always_call=True)
        self._hooks.append(weakref.ref(hook))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer, and note it: with ``local_steps`` its state differs between replicas."""
        for hook in self.hooks if self.options.local else ():
            hook.note(optimizer)
        return super().setup_optimizer(optimizer)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Backward, and the means of what it reached."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.model.backward())
            super().backward(*args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load; of a folder Lightning puts what was saved of a hook in its place, which the hook then takes up."""
        given = dict(state) if isinstance(state, dict) else {}
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        for key, hook in given.items():
            if isinstance(hook, ShardedHook) and state[key] is not hook:
                hook.load_state_dict(state[key])
                state[key] = hook
        return rest
