"""The host waits for its device nowhere within a forward, in any architecture, but for those that are named here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from baton.core.drafts import ROOT, Draft
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.runner.forward_pass import TransformersForward
from tests.device_steps import KernelLaunches, Steps, on_device, prepared, without_kernels
from tests.device_waits import DeviceWaits, Kind
from tests.tiny_models import CONFIGS, tiny_model

KNOWN = {
    # counts each expert's tokens on the host
    "jetmoe": "transformers/models/jetmoe/modeling_jetmoe.py:forward",
    # computes rotary frequencies on the host, in every forward
    "phimoe": "transformers/models/phimoe/modeling_phimoe.py:forward",
}
"""Architectures in whose forward the host waits, and where. They cannot be recorded as graphs."""
EXPERTS = "transformers/integrations/moe.py:_grouped_mm"
"""Waits in float32 and float16, and on GPUs of other compute capabilities than 9.0 and 10.0."""
TREE = Draft((5, 6, 7), (ROOT, ROOT, 0))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def mask() -> torch.Tensor:
    return numbers(5, 4, dtype=torch.bool)


def experts(dtype: torch.dtype) -> torch.Tensor:
    rows, weights = numbers(4, 16, dtype=dtype), numbers(2, 8, 16, dtype=dtype).transpose(1, 2)
    return torch.nn.functional.grouped_mm(rows, weights, offs=numbers(2, dtype=torch.int32))


WAITS: dict[str, tuple[Kind, Callable[[], Any]]] = {
    "item": (Kind.VALUE, lambda: numbers(4)[0].item()),
    "condition": (Kind.VALUE, lambda: bool(numbers(4).all())),
    "slice by a tensor": (Kind.VALUE, lambda: numbers(4)[: numbers(dtype=torch.int64)]),
    "equal": (Kind.VALUE, lambda: torch.equal(numbers(4), numbers(4))),
    "classes of one_hot": (Kind.VALUE, lambda: torch.nn.functional.one_hot(numbers(4, dtype=torch.int64))),
    "nonzero": (Kind.SHAPE, lambda: mask().nonzero()),
    "where": (Kind.SHAPE, lambda: torch.where(mask())),
    "index by a mask": (Kind.SHAPE, lambda: numbers(5, 4)[mask()]),
    "masked_select": (Kind.SHAPE, lambda: numbers(5, 4).masked_select(mask())),
    "tensor set by a mask": (Kind.SHAPE, lambda: numbers(5, 4).__setitem__(mask(), numbers())),
    "unique": (Kind.SHAPE, lambda: torch.unique(numbers(4))),
    "bincount": (Kind.SHAPE, lambda: torch.bincount(numbers(4, dtype=torch.int64))),
    "repeat_interleave": (Kind.SHAPE, lambda: numbers(4).repeat_interleave(numbers(4, dtype=torch.int64))),
    "tolist": (Kind.DOWNLOAD, lambda: numbers(4).tolist()),
    "cpu": (Kind.DOWNLOAD, lambda: numbers(4).cpu()),
    "experts in float32": (Kind.DOWNLOAD, lambda: experts(torch.float32)),
    "copy to the host": (Kind.DOWNLOAD, lambda: torch.zeros(4).copy_(numbers(4))),
    "tensor of a list": (Kind.UPLOAD, lambda: torch.tensor([1, 2], device="meta")),
    "tensor of a number": (Kind.UPLOAD, lambda: torch.tensor(1.0, device="meta")),
    "as_tensor": (Kind.UPLOAD, lambda: torch.as_tensor(np.ones(2), device="meta")),
    "new_tensor": (Kind.UPLOAD, lambda: numbers(4).new_tensor([1])),
    "copy from the host": (Kind.UPLOAD, lambda: numbers(4).copy_(torch.zeros(4))),
    "to": (Kind.UPLOAD, lambda: torch.zeros(4).to("meta")),
    "index by a list": (Kind.UPLOAD, lambda: numbers(5, 4)[[1, 2]]),
    "index by an array": (Kind.UPLOAD, lambda: numbers(5, 4)[:, np.array([1, 2])]),
    "index by a tensor of the host": (Kind.UPLOAD, lambda: numbers(5, 4)[torch.tensor([1, 2])]),
    "one element set": (Kind.UPLOAD, lambda: numbers(4).__setitem__(1, 0.0)),
}
NO_WAITS: dict[str, Callable[[], Any]] = {
    "number set by a mask": lambda: numbers(5, 4).__setitem__(mask(), 0),
    "experts in bfloat16": lambda: experts(torch.bfloat16),
    "row set": lambda: numbers(5, 4).__setitem__(1, 0.0),
    "full": lambda: torch.full((), 2.0, device="meta"),
    "number of the host's": lambda: numbers(4) + torch.tensor(2.0),
    "repeat_interleave to a known size": lambda: numbers(4).repeat_interleave(
        numbers(4, dtype=torch.int64), output_size=9
    ),
    "index by a tensor": lambda: numbers(5, 4)[numbers(2, dtype=torch.int64)],
}


@pytest.fixture(scope="module", autouse=True)
def launches() -> Iterator[KernelLaunches]:
    with without_kernels() as launches:
        yield launches


@pytest.mark.parametrize("in_inference", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_every_kind_of_wait_is_detected(name: str, in_inference: bool) -> None:
    kind, run = WAITS[name]
    with torch.inference_mode(in_inference):
        found = DeviceWaits().watch(run)
    assert [wait.kind for wait in found] == [kind]
    assert found[0].place.partition(":")[0] == "tests/unit/baton/engine/test_device_waits.py"


@pytest.mark.parametrize("name", NO_WAITS)
def test_operations_that_do_not_wait_are_not_reported(name: str) -> None:
    assert DeviceWaits().watch(NO_WAITS[name]) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_wait_in_a_forward_is_located(device: str) -> None:
    loaded = prepared(tiny_model("llama"))
    steps = Steps(loaded if device == "cpu" else on_device(loaded))

    def reads_a_number(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (2.0 if float(output.sum()) else 1.0)

    loaded.model.get_decoder().layers[1].register_forward_hook(reads_a_number)
    (wait,) = DeviceWaits(device).watch(steps.recorded(2, 1))
    assert wait.kind is Kind.VALUE
    assert wait.place == "tests/unit/baton/engine/test_device_waits.py:reads_a_number"


def test_an_upload_in_a_forward_is_located() -> None:
    steps = Steps(on_device(prepared(tiny_model("llama"))))
    scale = torch.full((32,), 2.0)  # no buffer, and so left on the host

    def scales(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * scale.to(output.device)

    steps.loaded.model.get_decoder().norm.register_forward_hook(scales)
    (wait,) = DeviceWaits().watch(steps.recorded(2, 1))
    assert (wait.kind, wait.place) == (Kind.UPLOAD, "tests/unit/baton/engine/test_device_waits.py:scales")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_waits_only_at_known_places(name: str, launches: KernelLaunches) -> None:
    known = {KNOWN[name]} if name in KNOWN else set()
    loaded = prepared(tiny_model(name))
    values = DeviceWaits("cpu")
    values.watch(Steps(loaded).recorded(2, 1))
    has_experts = "grouped_mm" in loaded.model.get_experts_implementation().values()
    assert set(values.places) <= known | ({EXPERTS} if has_experts else set()), str(values)

    steps, waits = Steps(on_device(loaded)), DeviceWaits()
    found = waits.watch(steps.recorded(2, 4))
    assert set(waits.places) == known, str(waits)
    assert found == waits.waits, "a graph would keep what was uploaded while it was recorded"
    launches.attend.calls.clear()
    waits.watch(steps.eager((20, 1), (100, 90), draft=TREE))
    assert set(waits.places) == known, str(waits)
    assert name in KNOWN or len(launches.attend.calls) == 2 * len(loaded.attention_layers)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_attention_in_plain_torch_never_waits(name: str) -> None:
    """Its tables and masks are uploaded once for each window."""
    steps, waits = Steps(on_device(prepared(tiny_model(name)))), DeviceWaits()
    steps.forward_pass = TransformersForward(steps.loaded, TorchSDPA(steps.cache))
    found = waits.watch(steps.eager((20, 1), (30, 9), draft=TREE))
    assert waits.waits == [], str(waits)
    assert found
