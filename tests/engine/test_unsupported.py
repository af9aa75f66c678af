"""What cannot work with a communication hook is refused, and what works is not."""

from contextlib import nullcontext

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.support.said import refusal

pytestmark = pytest.mark.usefixtures("one_rank")


def hooked(**options: object) -> tuple[DistributedDataParallel, ls.SparseHook]:
    ddp = DistributedDataParallel(nn.Linear(3, 3), **options)
    return ddp, ls.SparseHook(ddp, "sparse_dense")


def backwards(ddp: DistributedDataParallel, *synchronised: bool) -> None:
    for each in synchronised:
        with nullcontext() if each else ddp.no_sync():
            ddp(torch.ones(2, 3)).sum().backward()


def test_pytorchs_python_reducer_is_refused() -> None:
    """It hands a communication hook one gradient and its parameter."""
    ours = {"_fuse_ddp_communication": False, "_fuse_ddp_bucket_size": 25}  # what such a DDP sets for the process
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), torch._inductor.config.patch(ours):
        try:
            message = refusal(hooked)
        finally:
            torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
            torch._dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()
    assert "optimize_ddp must be" in message
    assert "got 'python_reducer'" in message


def test_a_capture_of_the_whole_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, hook = hooked()
    backwards(ddp, True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = refusal(backwards, ddp, True)
    assert "must not be captured in a CUDA graph" in message
    assert "make_graphed_callables" in message
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backwards(ddp, True)
    hook.close()


def test_a_static_graph_whose_first_backward_is_not_synchronised_is_refused() -> None:
    """PyTorch crashes on it, with an internal assertion."""
    ddp, hook = hooked(static_graph=True)
    message = refusal(backwards, ddp, False, True, True)
    assert "with static_graph=True the first backward must be synchronised" in message
    assert "Leave out static_graph=True" in message
    hook.close()


@pytest.mark.parametrize("static", [True, False])
def test_accumulation_from_the_second_step_on_is_not(static: bool) -> None:
    ddp, hook = hooked(static_graph=static)
    with torch.no_grad(), ddp.no_sync():  # as an evaluation before the first step
        ddp(torch.ones(2, 3))
    backwards(ddp, True, False, True)
    hook.close()


def test_a_model_by_itself_is_refused() -> None:
    message = refusal(ls.SparseHook, nn.Linear(3, 3))
    assert message.startswith("ddp must be a DistributedDataParallel; got Linear. Write SparseHook(")
