"""Compiles every kernel, as the library launches it, for devices that need not be there: ``python -m`` this module.

Each specialisation is one that a training of some strategy launches, on a fake device; so a kernel, a type or an
alignment that is new is compiled too.  ``python -m tests.kernels.compiled cuda:80 cuda:90 hip:gfx942`` prints a row for
each, with what it takes of the device, and fails with the compiler's error.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.fake_cuda import FakeCuda, kernel_modules
from tests.support.on_fake_cuda import COMPRESSORS, Training, gradients, local_steps, on_fake_cuda, parameters

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
STEPS = 2  # in which every kernel of a compressor is launched
LARGE = {"aligned": (2048, 2048), "odd": (100_003,), "one": (1,)}  # beside those of other tests


class Given:
    """A tensor as Triton sees it: its type, and whether it is aligned to 16 bytes."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self._address = x.dtype, x.storage_offset() * x.itemsize

    def data_ptr(self) -> int:
        return self._address


class Compiler(FakeCuda):
    """A device on which whatever is launched is compiled for ``target``, such as "cuda:80"."""

    def __init__(self, target: str) -> None:
        super().__init__()
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        kind, architecture = target.split(":")
        is_cuda = kind == "cuda"
        driver.set_active(
            _Driver(GPUTarget(kind, int(architecture) if is_cuda else architecture, 32 if is_cuda else 64))
        )
        self.compiled: dict[int, tuple[Any, Any]] = {}  # what Triton made of a specialisation, and of which kernel
        scatter = kernel_modules()[1]
        self._run = type(scatter._scatter).run

    def kernel(self, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        given = [Given(x) if isinstance(x, Tensor) else x for x in arguments]
        found = self._run(kernel, *given, grid=(1,), warmup=True, **options)
        # LLVM in Triton 3.6 once computed the upper four bits of each byte as zero.
        lost = re.search(r"mul\S* .*, 0f00000000;", found.asm.get("ptx", ""))
        assert not lost, f"{kernel.fn.__name__} multiplies with a zero that is not in its source: {lost}"
        self.compiled[id(found)] = kernel, found


class _Driver:
    """Takes the place of Triton's, which asks a device what it is."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all(cuda: FakeCuda) -> None:
    """Train a few steps with every compressor, in every format of values, and with every type of gradients."""
    for compressor in COMPRESSORS:
        for wire_dtype in WIRE_DTYPES:
            _train(cuda, compressor, str(wire_dtype), torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            _train(cuda, compressor, "float32", dtype)
    for wire_dtype in WIRE_DTYPES:
        with on_fake_cuda(cuda) as (_, nccl):
            of = parameters(LARGE)
            training = Training(local_steps(nccl, of, ls.Dense(), str(wire_dtype), error_decay=0.95), of, adam=True)
            for _ in range(STEPS + 1):  # the exchange of a step is applied after the next
                training.step()


def _train(cuda: FakeCuda, compressor: ls.Compressor, wire_dtype: str, dtype: torch.dtype) -> None:
    for shapes in (None, LARGE):
        with on_fake_cuda(cuda) as (_, nccl):
            of = parameters(shapes, dtype)
            training = Training(gradients(nccl, of, compressor, wire_dtype), of)
            for _ in range(STEPS):
                training.step()


def kernels() -> set[Any]:
    """Every kernel that a module's host functions can launch: not those that only other kernels call."""
    found = set()
    for module in kernel_modules():
        source = Path(str(module.__file__)).read_text()
        found |= {vars(module)[name] for name in re.findall(r"launch\(\s*(\w+),", source)}
    return found


def rows(compiler: Compiler) -> Iterator[str]:
    """What each kernel takes, in words: the most of all its specialisations."""
    taken: dict[str, list[dict[str, int]]] = {}
    for kernel, found in compiler.compiled.values():
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        used = {"warps": found.metadata.num_warps} | registers(found) | {"B of shared memory": found.metadata.shared}
        taken.setdefault(name, []).append(used)
    for name, each in sorted(taken.items()):
        most = ", ".join(f"{max(used[what] for used in each)} {what}" for what in each[0])
        yield f"{name:24} {len(each):3} specialisations, at most {most}"


def registers(found: Any) -> dict[str, int]:
    """Registers of a thread, and what does not fit into them."""
    if "amdgcn" in found.asm:
        names = {"vgpr_count": "vector registers", "sgpr_count": "scalar registers", "vgpr_spill_count": "spilt"}
        return {name: int(_number(rf"\.{key}:\s+(\d+)", found.asm["amdgcn"])) for key, name in names.items()}
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    names = {"REG": "registers", "STACK": "B of stack"}
    return {name: int(_number(rf"{key}:(\d+)", done.stdout)) for key, name in names.items()}


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in what the compiler says: {text[-1000:]}"
    return found[1]


def main(targets: Sequence[str]) -> None:
    """Compile for each of ``targets``, and print what kernels take."""
    for target in targets:
        compiler = Compiler(target)
        launch_all(compiler)
        left_out = kernels() - {kernel for kernel, _ in compiler.compiled.values()}
        assert not left_out, f"never launched: {sorted(kernel.fn.__name__ for kernel in left_out)}"
        print(f"{target}: {len(compiler.compiled)} specialisations of {len(kernels())} kernels compile")
        print("\n".join(rows(compiler)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or TARGETS)
