"""A CUDA device that is not there: tensors with shapes only, streams and events that note who waits for whom.

PyTorch's ``FakeTensorMode`` makes tensors "on cuda:0" on any machine; what a build without CUDA cannot do even so
(streams, events, futures, generators) is put in its place here.  :class:`FakeCuda` counts what is launched, and notes
where the host looks at data: ``bool(x)``, ``x.tolist()``, ``x.nonzero()``, ``x.cpu()``; what it sees there is made up.
A subclass may note more of each operation.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.kernels import ops

DEVICE = torch.device("cuda", 0)
KERNEL_MODULES = (
    "select_kernel", "scatter_kernel", "sketch_kernel", "index_kernel", "block_kernel", "float_kernel", "sparse_kernel",
)  # fmt: skip
VIEWS = {"aten.slice.Tensor", "aten.view.default", "aten.view.dtype"}  # besides those whose schema says so
NOT_LAUNCHED = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}


class Stream:
    """Takes the place of ``torch.cuda.Stream``."""

    def __init__(self, device: object = None, **options: object) -> None:
        self.device, self.made_by = device, FakeCuda.now()
        self.number = self.made_by.new_stream()

    def wait_stream(self, other: "Stream") -> None:
        self.made_by.wait(self, self.made_by.moment(other))

    def synchronize(self) -> None:
        self.made_by.host_waits(place(), self.made_by.moment(self))


class Event:
    """Takes the place of ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **options: object) -> None:
        self.made_by = FakeCuda.now()
        self.moment: Any = None

    def record(self, stream: Stream | None = None) -> None:
        self.moment = self.made_by.moment(stream or self.made_by.stream)

    def wait(self, stream: Stream | None = None) -> None:
        self.made_by.wait(stream or self.made_by.stream, self.moment)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.made_by.host_waits(place(), self.moment)

    def elapsed_time(self, other: "Event") -> float:
        self.made_by.host_waits(place(), other.moment)
        return 1.0


class Future:
    """Takes the place of ``torch.futures.Future``, which a build without CUDA makes of no CUDA device."""

    def __class_getitem__(cls, _: object) -> "type[Future]":
        return cls

    def __init__(self, devices: object = None) -> None:
        self.result: Any = None
        self.moment: Any = None

    def set_result(self, result: object) -> None:
        self.result, self.moment = result, FakeCuda.now().moment(FakeCuda.now().stream)

    def set_exception(self, error: BaseException) -> None:
        self.result = error

    def wait(self) -> Any:
        """What a stream waits for here, which is what DDP has the stream of backward do."""
        if isinstance(self.result, BaseException):
            raise self.result
        assert self.moment is not None, "nothing was given back"
        FakeCuda.now().wait(FakeCuda.now().stream, self.moment)
        return self.result

    def value(self) -> Any:
        return self.result

    def then(self, what: "Callable[[Future], Any]") -> "Future":
        """Have another stream do ``what``, as PyTorch has one from its pool do it."""
        after, cuda = Future(), FakeCuda.now()
        stream = Stream(DEVICE)
        cuda.wait(stream, self.moment)
        with cuda.on(stream):
            after.set_result(what(self))
        return after


class FakeCuda:
    """A fake device while it is entered.

    Attributes:
        launched: how often each operation was launched, by name.  Views and allocations are none; a kernel of ours is
            one, and so is all else that its host function launches.
        waits: where the host waited for what the device does in this step: the file and the function of the library.
        sees: what the host is told where it looks at data.
    """

    _active: "list[FakeCuda]" = []  # noqa: RUF012  # the one that is entered

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()
        self.waits: list[str] = []
        self.sees = 1.0
        self._streams = 0
        self._began = -1
        self.stream: Any = None
        self.default: Any = None

    @staticmethod
    def now() -> "FakeCuda":
        """The device that is entered."""
        return FakeCuda._active[-1]

    # - what a subclass may note

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def moment(self, stream: Stream) -> Any:
        """What ``stream`` has done when all that was launched on it so far is done."""
        return self.launches

    def wait(self, stream: Stream, moment: Any) -> None:
        """Have ``stream`` do nothing more before ``moment``."""

    def host_waits(self, how: str, moment: Any) -> None:
        """Have the host wait until ``moment``."""
        if moment > self._began:
            self.waits.append(how)

    def begin_step(self) -> None:
        """What was launched so far is of the step before, which the device is done with when the host looks at it."""
        self._began = self.launches

    def kernel(self, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Note a launch of a Triton kernel."""

    def look(self, x: Tensor) -> None:
        """Have the host wait for ``x``, which it looks at or copies."""
        self.host_waits(place(), self.moment(self.stream))

    def seen(self, dtype: torch.dtype) -> Any:
        """What the host is told that it sees."""
        return bool(self.sees) if dtype == torch.bool else int(self.sees) if not dtype.is_floating_point else self.sees

    def allocate(self, x: Tensor) -> None:
        """Note that ``x``, if it is new, was allocated for the current stream."""

    def host_reads(self, x: Tensor) -> None:
        """Note that the host reads ``x``, which lies on the host."""

    def touch(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note an operation on the current stream."""

    # - operations

    def launch(self, name: str) -> None:
        self.launched[name] += 1

    @property
    def launches(self) -> int:
        """All operations launched so far."""
        return sum(self.launched.values())

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Takes the place of ``torch.cuda.stream``."""
        before = self.stream
        self.stream = stream or before
        yield
        self.stream = before

    @contextmanager
    def entered(self) -> Iterator["FakeCuda"]:
        """Put all in its place."""
        FakeCuda._active.append(self)
        self.default = self.stream = Stream(DEVICE)
        try:
            with ExitStack() as stack:
                for each in self._replaced():
                    stack.enter_context(each)
                stack.enter_context(_guard())
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(_Operations(self))
                yield self
        finally:
            FakeCuda._active.pop()

    def _replaced(self) -> Iterator[AbstractContextManager[Any]]:
        in_place = {
            "Stream": Stream, "Event": Event, "stream": self.on, "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self.default, "device_of": lambda x: nullcontext(),
            "synchronize": lambda device=None: self.host_waits(place(), self.moment(self.stream)),
        }  # fmt: skip
        for name, fake in in_place.items():
            yield mock.patch.object(torch.cuda, name, fake)
        yield mock.patch.object(torch, "Generator", _generator)
        yield mock.patch("lightning_sparse.network.torch_comm.Future", Future)
        yield _launching(self)


class _Generator(torch.Generator):
    """Of the host, but it says that it is of the device, on which it draws numbers that nobody sees."""

    device = DEVICE


_REAL = torch.Generator


def _generator(device: object = None) -> torch.Generator:
    return _Generator() if torch.device(device or "cpu").type == "cuda" else _REAL()  # type: ignore[arg-type]


def place() -> str:
    """Which function of the library is at work: ``gradients/averager.py report``."""
    frame = sys._getframe()
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("lightning_sparse/")
        if found and not path.startswith("tests"):
            return f"{path} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "not the library"


# - operations


def _equal(cuda: "FakeCuda", x: Tensor, y: Tensor) -> bool:
    if place_of(x) != place_of(y):
        raise RuntimeError(f"Expected all tensors to be on the same device, got {place_of(x)} and {place_of(y)}")
    return True


# What looks at data, and what it is told: all places are other than zero, and everything is equal.
LOOKS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda cuda, x: cuda.seen(x.dtype),
    torch.ops.aten.equal.default: _equal,
    torch.ops.aten.masked_select.default: lambda cuda, x, mask: x.reshape(-1).clone(),
    torch.ops.aten.nonzero.default: lambda cuda, x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
}


class _Operations(TorchDispatchMode):
    """Counts what is launched on the device, and hands each operation on to be noted."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _fake(args) and not _fake(kwargs.values()):
            with unset_fake_temporarily():  # all on the host, where there is data
                return func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "lightning_sparse":
            return self._kernel(func, args, kwargs)
        if func is torch.ops.aten.index.Tensor and any(x.dtype == torch.bool for x in args[1] if x is not None):
            func = torch.ops.aten.masked_select.default
            args = args[0], args[1][0]
        if func in LOOKS:
            if place_of(args[0]) == "cuda":
                self._cuda.touch(str(func), list(_tensors(args)), [])
                self._cuda.look(args[0])
            else:
                self._cuda.host_reads(args[0])
            return LOOKS[func](self._cuda, *args)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation does, which came to ``result``."""
        name = str(func)
        if func.is_view or name in VIEWS:
            return
        read, written = _accesses(func, args, kwargs, result)
        for x in written:
            self._cuda.allocate(x)
        if not (on_device(read) or on_device(written)):
            for x in read:
                self._cuda.host_reads(x)
        elif name.rpartition(".")[0] not in NOT_LAUNCHED:
            self._cuda.launch(name)
            self._cuda.touch(name, read, written)
            self._note_copies(func, args, kwargs, result)

    def _note_copies(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note that the host waits in a copy between it and the device that does not say it must not."""
        aten = torch.ops.aten
        if func is aten.copy_.default:
            devices = place_of(args[0]), place_of(args[1])
            beside = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        elif func is aten._to_copy.default:
            devices, beside = (place_of(args[0]), place_of(result)), kwargs.get("non_blocking", False)
        else:
            return
        if not beside and set(devices) == {"cpu", "cuda"}:
            self._cuda.look(result)

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the host function that launches kernels, in place of what an operator does with fake tensors."""
        assert not kwargs
        name = func._schema.name.partition("::")[2]
        with self:  # what the host function launches itself
            result = _host_function(name)(*args)
        read, written = _accesses(func, args, kwargs, result)
        self._cuda.touch(name, read, written)
        return result


def _accesses(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes, its results included."""
    read, written = [], list(_tensors(result))
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(_tensors(given))
    return read, written


def _fake(given: Iterable[Any]) -> bool:
    """Whether any of what an operation is given lies on the device, or is to."""
    for x in given:
        if isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == "cuda"):
            return True
        if isinstance(x, list | tuple) and _fake(x):
            return True
    return False


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


def on_device(tensors: Sequence[Tensor]) -> bool:
    return any(place_of(x) == "cuda" for x in tensors)


def place_of(x: Tensor) -> str:
    """Where ``x`` lies, which a fake tensor would go through all modes to say."""
    return (x.fake_device if isinstance(x, FakeTensor) else x.device).type


@contextmanager
def _guard() -> Iterator[None]:
    """Have a build without CUDA go to "cuda:0" and back: by the guard of the meta device, which does nothing.

    PyTorch puts a guard that does nothing in place itself, in ``FakeTensorMode``, but only in builds with CUDA.
    """
    guards = _guards()
    before = guards[CUDA]
    if before is None:
        guards[CUDA] = guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


CUDA, META = 1, 14  # of c10::DeviceType


def _guards() -> Any:
    """PyTorch's guards, by the type of device."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


def unavailable_reason() -> str | None:
    """Why no device can be faked here, if so."""
    if torch.backends.cuda.is_built():
        return "needs a build of PyTorch for CPUs: one for CUDA asks for a device even of fake tensors"
    try:
        return None if _guards()[META] else "this build of PyTorch has no guard for the meta device"
    except (OSError, ValueError) as error:
        return f"the guards of this build of PyTorch cannot be set: {error}"


# - kernels


def _host_function(name: str) -> Callable[..., Any]:
    """The function that launches the kernels of an operator."""
    (found,) = (vars(m)[name] for m in kernel_modules() if getattr(vars(m).get(name), "__module__", "") == m.__name__)
    return found  # type: ignore[no-any-return]


@cache
def kernel_modules() -> list[ModuleType]:
    """The modules with kernels in Triton; where that is missing they are imported with something in its place."""
    names = [f"lightning_sparse.kernels.{name}" for name in KERNEL_MODULES]
    if ops.HAS_TRITON:
        return [import_module(name) for name in names]
    language = ModuleType("triton.language")
    language.tensor = language.constexpr = object  # type: ignore[attr-defined]
    triton = ModuleType("triton")
    triton.language, triton.jit, triton.JITFunction = language, _jit, _Kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        return [import_module(name) for name in names]


class _Kernel:
    """Takes the place of Triton's ``JITFunction``."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return partial(self.run, grid=grid, warmup=False)

    def run(self, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        raise NotImplementedError


def _jit(fn: Any = None, **options: object) -> Any:
    """Takes the place of ``triton.jit``, with options or without."""
    return _Kernel if fn is None else _Kernel(fn)


def _launching(cuda: FakeCuda) -> AbstractContextManager[Any]:
    """Have kernels be launched on ``cuda``."""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        cuda.launch(f"kernel {kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")
        cuda.kernel(kernel, arguments, options)

    scatter = kernel_modules()[1]
    return mock.patch.object(type(scatter._scatter), "run", run)
