"""Keys and values as int8 with scales: about half the size of bfloat16, and LOSSY.

A vector (one head's key or value of one token) is stored as integers from -127 to 127 times one float32 (symmetric, no
offset). A number is off by at most half a scale, which is a 254th of the vector's largest number, plus the rounding of
the model's dtype. A vector of zeros stays zero. A vector with a non-finite number becomes entirely non-finite, so that
broken values stay visible.

    on the wire    |numbers of all vectors, int8|scales of all vectors, float32|     per tensor: by token, then head
    in a cache     |numbers, int8|scale, float32|                                    per vector
"""

from __future__ import annotations

import math

import torch

from baton.core.kv_spec import SCALE_BYTES

# Slightly less than a 127th, so that the largest number of a dtype does not become infinite.
LARGEST_TO_SCALE = (1 - 2**-20) / 127
SMALLEST = 1e-35
"""Vectors of smaller numbers become zeros: their scales would be subnormal."""


def encode(vectors: torch.Tensor, out: torch.Tensor) -> None:
    """Encodes vectors for the wire.

    Args:
        vectors: ``[num_tensors, num_tokens, num_heads, dim]``, in any dtype of a cache.
        out: uint8 ``[num_tensors, num_tokens * num_heads * (dim + 4)]``, written.
    """
    num_numbers = vectors[0].numel()
    numbers, scales = _quantized(vectors)
    out[:, :num_numbers].view(torch.int8).copy_(numbers.flatten(1))
    out[:, num_numbers:].copy_(scales.flatten(1).view(torch.uint8))


def decode(data: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Decodes the output of :func:`encode`.

    Args:
        data: as ``out`` there, at any address.
        shape: ``(num_tokens, num_heads, dim)``.
    """
    num_numbers = math.prod(shape)
    copied = data[:, num_numbers:].clone(memory_format=torch.contiguous_format)  # aligned for float32
    scales = copied.view(torch.float32).view(len(data), *shape[:2], 1)
    numbers = data[:, :num_numbers].view(torch.int8).float().view(len(data), *shape)
    return numbers.mul_(scales).to(dtype)


def encode_rows(vectors: torch.Tensor) -> torch.Tensor:
    """Encodes vectors ``[..., dim]`` as rows of a cache, int8 ``[..., dim + 4]``; ``dim`` is a multiple of 4."""
    numbers, scales = _quantized(vectors)
    return torch.cat((numbers.to(torch.int8), scales[..., None].view(torch.int8)), dim=-1)


def decode_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decodes the output of :func:`encode_rows`; ``rows`` is contiguous."""
    numbers, scales = rows[..., :-SCALE_BYTES], scales_of_rows(rows)
    return numbers.float().mul_(scales[..., None]).to(dtype)


def scales_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The scales of rows, as a view, float32 ``[...]``."""
    return rows.view(torch.float32)[..., -1]


def _quantized(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns integers as float32 ``[..., dim]``, and scales ``[...]``."""
    exact = vectors.float()
    numbers = exact.abs()
    largest = numbers.amax(-1)  # a norm would take ten times as long
    scales = largest.masked_fill_(largest < SMALLEST, 0.0).mul_(LARGEST_TO_SCALE)
    divisors = scales.masked_fill(scales == 0.0, 1.0)
    return torch.div(exact, divisors[..., None], out=numbers).round_(), scales
