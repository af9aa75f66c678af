"""What is easily got wrong is answered with what must be, what was given, and what to do."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.fabric import Fabric

import lightning_sparse as ls
from lightning_sparse import fabric
from lightning_sparse.compressors.base import OPTIONS
from lightning_sparse.options import Options

HERE: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
RUNS = [pytest.param(lambda given: L.Trainer(strategy=given, logger=False, **HERE), id="trainer"),
        pytest.param(lambda given: Fabric(strategy=given, **HERE), id="fabric")]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("given", [ls.MiCRO(density=0.1), ls.Auto(), ls.MiCRO, "mirco", "micro:density=0.1"])
def test_what_is_no_strategy_is_left_to_lightning(run: Callable[[Any], Any], given: Any) -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        run(given)


@pytest.mark.parametrize("kind", [ls.SparseDDPStrategy, ls.SparseHSDPStrategy, fabric.SparseDDPStrategy])
def test_a_name_given_to_a_strategy_is_answered_with_the_right_one(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"got 'mirco'\. Did you mean 'micro'\?"):
        kind("mirco")
    with pytest.raises(ValueError, match=r"Write SparseDDPStrategy\('sparse_dense', local_steps=16\)"):
        kind("local_steps")
    with pytest.raises(TypeError, match=r"Write MiCRO\(\)"):
        kind(ls.MiCRO)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_given_to_a_compressor_is_answered_with_the_strategy(name: str) -> None:
    write = f"write SparseDDPStrategy(MiCRO(density=0.1), {name}={OPTIONS[name]!r})"
    with pytest.raises(TypeError, match=re.escape(write)):
        ls.MiCRO(density=0.1, **{name: OPTIONS[name]})  # type: ignore[arg-type]  # a mistake
    options = {"local_steps": 2} if name == "elastic" else {}  # without which it is refused
    ls.SparseDDPStrategy(ls.MiCRO(density=0.1), **options | {name: OPTIONS[name] if name != "local_group" else 1})  # type: ignore[arg-type]


def test_options_that_compressors_know_of_are_the_strategys() -> None:
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(Options)} - {"compressor", "bucket_bytes"}


def test_a_misspelt_setting_is_answered_with_the_right_one() -> None:
    with pytest.raises(TypeError, match=r"densty must be one of its settings, .*; got .* Did you mean density"):
        ls.MiCRO(densty=0.1)  # type: ignore[call-arg]  # a mistake
    with pytest.raises(TypeError, match=r"Dense: density must be one of its settings, of which it has none"):
        ls.Dense(density=0.1)  # type: ignore[call-arg]  # a mistake
    with pytest.raises(TypeError, match=r"Auto: atmost must be one of .*; got atmost=1\. Did you mean at_most"):
        ls.Auto(atmost=1)  # type: ignore[call-arg]  # a mistake
    with pytest.raises(TypeError, match=r"LocalSteps: every must be one of its settings, steps, .*; got every=4"):
        ls.LocalSteps(every=4)  # type: ignore[call-arg]  # a mistake


def test_a_number_in_quotation_marks_is_none() -> None:
    for make, must in (
        (lambda: ls.MiCRO(density="0.3"), "density must be a number above 0 and at most 1; got '0.3'"),  # type: ignore[arg-type]  # a mistake
        (lambda: ls.SkipReduce(skip="0.5"), r"skip must be a number in \[0, 1\], .*; got '0.5'"),  # type: ignore[arg-type]  # a mistake
        (lambda: ls.Auto(at_most="0.02"), "at_most must be a number from 0 to 1, or None; got '0.02'"),  # type: ignore[arg-type]  # a mistake
    ):
        with pytest.raises(ValueError, match=must):
            make()


def test_what_auto_allows_is_said_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"at_most must be a number from 0 to 1, or None; got -1\. Give the part"):
        ls.Auto(at_most=-1)
    with pytest.raises(ValueError, match=r"candidates must be a list .*; got MiCRO.*\. Write Auto\(\[MiCRO\(\)\]\)"):
        ls.Auto(ls.MiCRO())  # type: ignore[arg-type]  # a mistake


@dataclasses.dataclass(frozen=True, init=False)
class Percent(ls.Dense):
    density: float

    def __init__(self, percent: float) -> None:
        object.__setattr__(self, "density", percent / 100)


def test_a_compressor_of_ones_own_may_be_made_of_other_arguments() -> None:
    assert Percent(percent=5).density == 0.05
    with pytest.raises(TypeError, match=r"precent must be one of its settings, percent; got .* Did you mean percent"):
        Percent(precent=5)  # type: ignore[call-arg]  # a mistake
