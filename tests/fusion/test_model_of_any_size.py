"""Plans of groups of any size, by arithmetic."""

from hypothesis import strategies as st

from lightning_sparse.fusion.model import Cost, SizeCost, StepModel
from tests.support.fuzz import LARGE, fuzzed


@fuzzed(100, elements=st.lists(st.integers(0, LARGE), min_size=1, max_size=12))
def test_plans_of_any_size_hold_every_element(elements: list[int]) -> None:
    cost = Cost(SizeCost(256, 1e-5, 1e-5, 1e-3, 256), SizeCost(2**20, 1e-3, 1e-3, 2e-3, 2**20))
    model = StepModel(tuple(float(i) for i in range(len(elements))), tuple((n,) for n in elements), (cost,))
    assert model.best()[-1] == len(elements)
    assert model.span(model.best()) >= sum(elements[-1:]) * 9e-10
