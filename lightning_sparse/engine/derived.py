"""Plain tensors that PyTorch's own hooks derive from a parameter before each forward: pruned or normalised weights."""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def derive_anew(module: nn.Module | None) -> None:
    """Derive them from what the parameters hold now, for whoever reads them before the next forward."""
    for owner, hook in _hooks_in(module):
        if isinstance(hook, BasePruningMethod):
            setattr(owner, hook._tensor_name, hook.apply_mask(owner))
        elif isinstance(hook, WeightNorm):
            setattr(owner, hook.name, hook.compute_weight(owner))
        elif isinstance(hook, SpectralNorm):
            setattr(owner, hook.name, hook.compute_weight(owner, do_power_iteration=False))


def _hooks_in(module: nn.Module | None) -> Iterator[tuple[nn.Module, object]]:
    for owner in () if module is None else module.modules():
        for hook in getattr(owner, "_forward_pre_hooks", {}).values():
            yield owner, hook
