"""What all tests have: settings, markers, and the fixtures that more than one file asks for."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from lightning_sparse.auto import active_averager
from lightning_sparse.bench.cluster import unavailable_reason
from tests.support.fuzz import TRIES
from tests.support.processes import Ranks

# The same examples in every run, and few: FUZZ_TRIES has others tried, see tests/support/fuzz.py.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40, derandomize=not TRIES
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fuzzed: tries random input; FUZZ_TRIES=1000 tries more of it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("cluster"):  # in one worker: creating a cluster removes what others left behind
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def emulated(timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that builds a cluster and takes no longer."""
    reason = unavailable_reason()
    skip = pytest.mark.skipif(reason is not None, reason=reason or "")
    return lambda test: pytest.mark.cluster(pytest.mark.timeout(timeout_s)(skip(test)))


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compress_alone(patch: pytest.MonkeyPatch) -> None:
    """Let compressors and local steps work in ``one_rank`` too, though there is nobody to send to."""
    patch.setattr(active_averager, "_dense_if_alone", lambda config, *_, **__: config)
