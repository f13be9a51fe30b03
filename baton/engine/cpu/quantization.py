"""Quantized weights: int8 with a scale for each row, int4 with a step and a minimum for each 32 numbers of a row.

Activations, norms, biases, the embedding and the KV cache are not quantized. The head is never below int8, since it
determines every logit. Numbers are rounded to the nearest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from baton.core.errors import NotFusableError
from baton.engine.cpu.nibbles import GROUP, GROUP_ROWS
from baton.engine.cpu.structure import Decoder, Linear

_LARGEST = 127
_MOST_LEVEL = 15
_ROWS_PER_WORD = 4


def quantize(decoder: Decoder, weights: str) -> Decoder:
    """Returns the decoder with ``int8`` or ``int4`` linear layers and an int8 head.

    The original weights are not changed.
    """
    made = quantize_linear_int4 if weights == "int4" else quantize_linear
    layers = tuple(
        replace(
            layer,
            q=made(layer.q),
            k=made(layer.k),
            v=made(layer.v),
            o=made(layer.o),
            gate=made(layer.gate),
            up=made(layer.up),
            down=made(layer.down),
        )
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, lm_head=quantize_linear(decoder.lm_head))


def quantize_linear(linear: Linear) -> Linear:
    """Quantizes to int8: a row is integers from -127 to 127, times one float32.

    A row with a non-finite number becomes non-finite.
    """
    weight = linear.weight.float()
    scales = weight.abs().amax(dim=1) / _LARGEST
    whole = (weight / scales[:, None]).nan_to_num(0.0).round().to(torch.int8)  # rows of zeros have the scale 0
    return Linear(whole.contiguous(), linear.bias, scales.contiguous())


def quantize_linear_int4(linear: Linear) -> Linear:
    """Quantizes to int4: a group of 32 numbers of a row is levels from 0 to 15, times a step, plus a minimum.

    Steps and minimums are float16, as in GGUF's Q4_1: weights that lost precision to it once do not lose it again.
    Groups are stored in reading order: bands of 16 rows one after the other, the groups of a band from left to right.

    Returns:
        ``weight``, int16 ``[bands, groups, 4, 32]``: bits ``4 * r`` to ``4 * r + 3`` of word ``[.., n, i]`` are number
        ``i`` of the band's row ``4 * n + r``. ``scales``, float16 ``[bands, groups, 2, 16]``: the rows' steps, then
        their minimums. The padding of the last band and group is ignored. A group with a non-finite number becomes
        non-finite.

    Raises:
        NotFusableError: weights, or the differences between them, are too large for float16.
    """
    weight = linear.weight.float()
    num_rows, width = weight.shape
    weight = functional.pad(weight[None], (0, -width % GROUP), mode="replicate")[0]
    weight = functional.pad(weight, (0, 0, 0, -num_rows % GROUP_ROWS))
    grouped = weight.view(-1, GROUP_ROWS, weight.shape[1] // GROUP, GROUP)
    least = grouped.amin(-1)
    steps = ((grouped.amax(-1) - least) / _MOST_LEVEL).half()
    # If a group's numbers are closer together than the smallest step, all of them become their mean.
    least = torch.where(steps == 0, grouped.mean(-1), least).half()
    if not (torch.isfinite(steps) & torch.isfinite(least))[torch.isfinite(grouped).all(-1)].all():
        raise NotFusableError("some of its weights are too large for int4, whose scales are float16")
    levels = (grouped - least.float()[..., None]) / steps.float()[..., None]
    levels = levels.round().nan_to_num(0.0).clamp(0, _MOST_LEVEL).to(torch.int32)  # equal numbers have the step 0
    shifts = 4 * torch.arange(_ROWS_PER_WORD)[:, None, None]
    words = (levels.view(len(levels), -1, _ROWS_PER_WORD, *levels.shape[2:]) << shifts).sum(2)
    scales = torch.stack((steps, least), dim=1)
    return Linear(
        words.to(torch.int16).transpose(1, 2).contiguous(), linear.bias, scales.permute(0, 3, 1, 2).contiguous()
    )
