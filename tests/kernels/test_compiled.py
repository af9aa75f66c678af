"""Every kernel compiles for the devices we know of, none of which need be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparse.kernels import ops
from tests.kernels.compiled import TARGETS
from tests.support.fake_cuda import unavailable_reason

TIME_LIMIT_S = 540  # of one core of a busy machine; about 100 s of a quiet one

needs_triton = pytest.mark.skipif(not ops.HAS_TRITON, reason="needs triton, which is optional: pip install triton")
reason = unavailable_reason()


@needs_triton
@pytest.mark.skipif(reason is not None, reason=reason or "")
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", target],
        cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=TIME_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert f"{target}: " in done.stdout
    with capsys.disabled():
        print(f"\n{done.stdout}")
