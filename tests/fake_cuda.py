"""``torch.cuda``'s streams and events over the device of :mod:`tests.stream_checker`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.device_tensors import DeviceTensors
from tests.stream_checker import Device, Operation


class FakeStream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, device: Device, number: int) -> None:
        self._device, self.number = device, number

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        self._device.wait_in(self.number, self._device.mark(stream.number))

    def synchronize(self) -> None:
        self._device.synchronize(self.number)


class FakeEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark: Operation | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self._mark = self._device.mark(self._device.current if stream is None else stream.number)

    def wait(self, stream: FakeStream | None = None) -> None:
        if self._mark is not None:
            self._device.wait_in(self._device.current if stream is None else stream.number, self._mark)

    def query(self) -> bool:
        return self._mark is None or self._device.is_done(self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._device.wait(self._mark)


class _HostFunctions(TorchFunctionMode):
    """Moves tensors of the host to the device for functions that name the device."""

    def __init__(self, tensors: DeviceTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tensors.call(func, args, kwargs or {})


@contextmanager
def fake_cuda(device: Device) -> Iterator[DeviceTensors]:
    """Makes ``torch.cuda`` the fake device, for this thread and threads that start within the context."""
    tensors = DeviceTensors(device)
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _HostFunctions(tensors):
            run(thread)

    @contextmanager
    def in_stream(stream: FakeStream) -> Iterator[None]:
        with device.stream(stream.number):
            yield

    replaced = {
        "Stream": lambda *_, **__: FakeStream(device, device.new_stream()),
        "Event": lambda *_, **__: FakeEvent(device),
        "current_stream": lambda *_: FakeStream(device, device.current),
        "default_stream": lambda *_: FakeStream(device, 0),
        "stream": in_stream,
        "synchronize": lambda *_: device.synchronize(),
    }
    with pytest.MonkeyPatch.context() as patch, _HostFunctions(tensors):
        for name, fake in replaced.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(threading.Thread, "run", run_with_device)
        yield tensors
