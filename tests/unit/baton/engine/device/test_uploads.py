"""Uploads, and rows gathered by uploaded indices, equal those of plain torch."""

from __future__ import annotations

import pytest
import torch

from baton.engine.device.uploads import take_rows, upload_numbers

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [[], [0], [4], [1, 2, 3], [0, 1, 2, 3, 4], [2, 1], [0, 2], [3, 3]])
def test_uploaded_rows_match_indexing(rows: list[int]) -> None:
    tensor = torch.randn(5, 3)
    taken = take_rows(tensor, rows)
    assert torch.equal(taken, tensor[rows])
    is_view = taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert is_view == (rows == list(range(rows[0], rows[0] + len(rows))) if rows else True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_round_trip_as_bytes(dtype: torch.dtype) -> None:
    numbers = torch.randn(7).to(dtype)
    data = bytes(numbers.view(torch.uint8).numpy())
    assert torch.equal(upload_numbers(data, 7, dtype, CPU), numbers)


@pytest.mark.parametrize("num_bytes", [0, 27, 29, 32])
def test_wrong_sizes_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected 7 numbers"):
        upload_numbers(bytes(num_bytes), 7, torch.float32, CPU)
