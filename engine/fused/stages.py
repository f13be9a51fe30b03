"""What the stages of a forward compute, one chunk at a time."""

from __future__ import annotations

from numba import njit

from engine.fused.arithmetic import (
    add_operands,
    add_row,
    floats,
    gated_silu,
    item_size,
    numbers,
    operands,
    rms_norm,
    rms_norm_in_place,
    rotate,
    round_row,
    widen_row,
)
from engine.fused.attention import attend, join_splits
from engine.fused.products import BAND, band_product, band_scratch_bytes
from engine.fused.tables import Item, Layer, Model, Scale, Span, Stage, Step

TOKEN_BLOCK = 256
"""Tokens that are multiplied with a band of weights before the next band."""
_PRODUCT_BYTES = 4 * BAND * TOKEN_BLOCK


def product_scratch_bytes(widest: int, item_bytes: int) -> int:
    """Memory that one thread needs for products: two bands' results, and a band of int8 or int4 as operands.

    Args:
        widest: row of a weight of these; 0: there is none.
    """
    return 2 * _PRODUCT_BYTES + band_scratch_bytes(widest, item_bytes)


@njit(error_model="numpy")
def _blocks(num_tokens):
    return (num_tokens + TOKEN_BLOCK - 1) // TOKEN_BLOCK


@njit(error_model="numpy")
def _bands(width):
    return (width + BAND - 1) // BAND


@njit(error_model="numpy")
def _normed_token(kind, model, step, layer, table, scales, token):
    """Embeds (before the first layer), keeps the state if it is a feature, and norms it for the layer."""
    hidden, size = model[Model.HIDDEN], item_size(kind)
    state = floats(step[Step.STATES] + 4 * hidden * token, hidden)
    place = step[Step.NORMED] + token * model[Model.INPUT] * size
    if layer == 0:
        token_ids = numbers(step[Step.TOKEN_IDS], step[Step.NUM_TOKENS])
        widen_row(kind, operands(kind, model[Model.EMBEDDING] + token_ids[token] * hidden * size, hidden), state)
    _keep_feature(kind, model, step, layer, token, state)
    weight = operands(kind, table[Layer.INPUT_NORM], hidden)
    rms_norm(kind, state, weight, scales[Scale.INPUT_EPS], operands(kind, place, hidden))
    if table[Layer.HIDDEN_NORM]:
        _normed_hidden(kind, model, step, table, scales, token, state, operands(kind, place + hidden * size, hidden))


@njit(error_model="numpy")
def _normed_hidden(kind, model, step, table, scales, token, state, out):
    """Norms the hidden state that comes with a token; it, or its norm, begins the residual stream."""
    hidden = state.size
    widen_row(kind, operands(kind, step[Step.HIDDEN] + token * hidden * item_size(kind), hidden), state)
    weight = operands(kind, table[Layer.HIDDEN_NORM], hidden)
    rms_norm(kind, state, weight, scales[Scale.HIDDEN_EPS], out)
    if model[Model.NORMED_RESIDUAL]:
        widen_row(kind, out, state)


@njit(error_model="numpy")
def _keep_feature(kind, model, step, layer, token, state):
    if step[Step.FEATURES] == 0:
        return
    column = numbers(model[Model.FEATURES], model[Model.NUM_LAYERS] + 2)[layer]
    if column >= 0:
        place = (token * step[Step.NUM_FEATURES] + column) * state.size * item_size(kind)
        round_row(kind, state, operands(kind, step[Step.FEATURES] + place, state.size))


@njit(error_model="numpy")
def _projection(kind, model, step, table, chunk, scratch):
    """A band of one of the three input projections."""
    dim, length, size = model[Model.HEAD_DIM], model[Model.INPUT], item_size(kind)
    q_width, kv_width = model[Model.NUM_HEADS] * dim, model[Model.NUM_KV_HEADS] * dim
    q_bands, kv_bands = _bands(q_width), _bands(kv_width)
    bands = q_bands + 2 * kv_bands
    block, band = chunk // bands, chunk % bands
    if band < q_bands:
        weight, scales, bias = table[Layer.Q], table[Layer.Q_SCALES], table[Layer.Q_BIAS]
        width, column = q_width, 0
    elif band < q_bands + kv_bands:
        weight, scales, bias = table[Layer.K], table[Layer.K_SCALES], table[Layer.K_BIAS]
        width, column = kv_width, q_width
        band -= q_bands
    else:
        weight, scales, bias = table[Layer.V], table[Layer.V_SCALES], table[Layer.V_BIAS]
        width, column = kv_width, q_width + kv_width
        band -= q_bands + kv_bands
    first = band * BAND
    count = min(BAND, width - first)
    token = block * TOKEN_BLOCK
    num_tokens = min(TOKEN_BLOCK, step[Step.NUM_TOKENS] - token)
    ldo = 4 * (q_width + 2 * kv_width)
    out = step[Step.PROJECTED] + token * ldo + 4 * (column + first)
    x, ldx = step[Step.NORMED] + token * length * size, length * size
    grouped, widened = model[Model.GROUPED], scratch + 2 * _PRODUCT_BYTES
    band_product(kind, x, ldx, num_tokens, weight, scales, grouped, first, count, length, out, ldo, widened)
    if bias:
        row = operands(kind, bias + first * size, count)
        for i in range(num_tokens):
            add_operands(kind, floats(out + i * ldo, count), row)


@njit(error_model="numpy")
def _rotated_token(kind, model, step, table, scales, token):
    """Norms and rotates a token's queries and keys, and stores its keys and values."""
    num_heads, num_kv_heads, dim = model[Model.NUM_HEADS], model[Model.NUM_KV_HEADS], model[Model.HEAD_DIM]
    size, num_tokens = item_size(kind), step[Step.NUM_TOKENS]
    share, half = num_heads // num_kv_heads, dim // 2
    cos = floats(step[Step.COS] + 4 * half * token, half)
    sin = floats(step[Step.SIN] + 4 * half * token, half)
    row = step[Step.PROJECTED] + 4 * (num_heads + 2 * num_kv_heads) * dim * token
    slot = numbers(step[Step.SLOTS], num_tokens)[token]
    for head in range(num_heads):
        values = floats(row + 4 * dim * head, dim)
        if table[Layer.Q_NORM]:
            rms_norm_in_place(kind, values, operands(kind, table[Layer.Q_NORM], dim), scales[Scale.Q_EPS])
        place = ((head // share * num_tokens + token) * share + head % share) * dim * size
        rotate(kind, values, cos, sin, operands(kind, step[Step.QUERIES] + place, dim))
    for head in range(num_kv_heads):
        place = (slot * num_kv_heads + head) * dim * size
        values = floats(row + 4 * dim * (num_heads + head), dim)
        if table[Layer.K_NORM]:
            rms_norm_in_place(kind, values, operands(kind, table[Layer.K_NORM], dim), scales[Scale.K_EPS])
        rotate(kind, values, cos, sin, operands(kind, table[Layer.KEYS] + place, dim))
        values = floats(row + 4 * dim * (num_heads + num_kv_heads + head), dim)
        round_row(kind, values, operands(kind, table[Layer.VALUES] + place, dim))


@njit(error_model="numpy")
def _added_band(kind, step, x, k, weight, scales, grouped, bias, width, chunk, scratch):
    """A band of a product that is added to the residual stream."""
    bands, size = _bands(width), item_size(kind)
    block, first = chunk // bands, chunk % bands * BAND
    count = min(BAND, width - first)
    token = block * TOKEN_BLOCK
    num_tokens = min(TOKEN_BLOCK, step[Step.NUM_TOKENS] - token)
    x, ld, ldo, widened = x + token * k * size, k * size, 4 * BAND, scratch + 2 * _PRODUCT_BYTES
    band_product(kind, x, ld, num_tokens, weight, scales, grouped, first, count, k, scratch, ldo, widened)
    for i in range(num_tokens):
        state = floats(step[Step.STATES] + 4 * ((token + i) * width + first), count)
        add_row(state, floats(scratch + 4 * BAND * i, count))
        if bias:
            add_operands(kind, state, operands(kind, bias + first * size, count))


@njit(error_model="numpy")
def _gated_band(kind, model, step, table, chunk, scratch):
    """``silu(gate) * up`` of a band of both."""
    hidden, width, size = model[Model.HIDDEN], model[Model.INTERMEDIATE], item_size(kind)
    bands = _bands(width)
    block, first = chunk // bands, chunk % bands * BAND
    count = min(BAND, width - first)
    token = block * TOKEN_BLOCK
    num_tokens = min(TOKEN_BLOCK, step[Step.NUM_TOKENS] - token)
    ld, ldo = hidden * size, 4 * BAND
    x, grouped = step[Step.NORMED] + token * ld, model[Model.GROUPED]
    other, widened = scratch + _PRODUCT_BYTES, scratch + 2 * _PRODUCT_BYTES
    gates, scales = table[Layer.GATE], table[Layer.GATE_SCALES]
    band_product(kind, x, ld, num_tokens, gates, scales, grouped, first, count, hidden, scratch, ldo, widened)
    ups, scales = table[Layer.UP], table[Layer.UP_SCALES]
    band_product(kind, x, ld, num_tokens, ups, scales, grouped, first, count, hidden, other, ldo, widened)
    for i in range(num_tokens):
        gate, up = floats(scratch + 4 * BAND * i, count), floats(other + 4 * BAND * i, count)
        if table[Layer.GATE_BIAS]:
            add_operands(kind, gate, operands(kind, table[Layer.GATE_BIAS] + first * size, count))
            add_operands(kind, up, operands(kind, table[Layer.UP_BIAS] + first * size, count))
        target = step[Step.GATED] + ((token + i) * width + first) * size
        gated_silu(kind, gate, up, operands(kind, target, count))


@njit(error_model="numpy")
def _logit_band(kind, model, step, chunk, scratch):
    hidden, width, size = model[Model.HIDDEN], model[Model.VOCAB], item_size(kind)
    bands = _bands(width)
    block, first = chunk // bands, chunk % bands * BAND
    count = min(BAND, width - first)
    row = block * TOKEN_BLOCK
    num_rows = min(TOKEN_BLOCK, step[Step.NUM_ROWS] - row)
    ld, ldo = hidden * size, 4 * width
    out = step[Step.LOGITS] + row * ldo + 4 * first
    x = step[Step.MIXED] + row * ld
    weight, scales = model[Model.LM_HEAD], model[Model.LM_HEAD_SCALES]
    widened = scratch + 2 * _PRODUCT_BYTES
    band_product(kind, x, ld, num_rows, weight, scales, 0, first, count, hidden, out, ldo, widened)
    if model[Model.LM_HEAD_BIAS]:
        bias = operands(kind, model[Model.LM_HEAD_BIAS] + first * size, count)
        for i in range(num_rows):
            add_operands(kind, floats(out + i * ldo, count), bias)


@njit(error_model="numpy")
def _final_features(kind, model, step, token):
    """Keeps what leaves the last layer, before and behind the final norm, where these are features."""
    hidden, size, num_layers = model[Model.HIDDEN], item_size(kind), model[Model.NUM_LAYERS]
    state = floats(step[Step.STATES] + 4 * hidden * token, hidden)
    _keep_feature(kind, model, step, num_layers, token, state)
    column = numbers(model[Model.FEATURES], num_layers + 2)[num_layers + 1]
    if column >= 0:
        place = (token * step[Step.NUM_FEATURES] + column) * hidden * size
        _final_norm(kind, model, step, token, operands(kind, step[Step.FEATURES] + place, hidden))


@njit(error_model="numpy")
def _final_norm(kind, model, step, token, out):
    hidden = model[Model.HIDDEN]
    state = floats(step[Step.STATES] + 4 * hidden * token, hidden)
    rms_norm(kind, state, operands(kind, model[Model.FINAL_NORM], hidden), floats(model[Model.SCALES], 1)[0], out)


@njit(error_model="numpy")
def num_chunks(model, step, stage):
    """Chunks of a stage that may be computed in any order."""
    num_tokens, dim = step[Step.NUM_TOKENS], model[Model.HEAD_DIM]
    blocks = _blocks(num_tokens)
    if stage == Stage.PROJECT:
        return blocks * (_bands(model[Model.NUM_HEADS] * dim) + 2 * _bands(model[Model.NUM_KV_HEADS] * dim))
    if stage == Stage.ATTEND:
        return step[Step.NUM_ITEMS]
    if stage == Stage.JOIN:
        return step[Step.NUM_JOINS]
    if stage == Stage.OUTPUT or stage == Stage.DOWN:
        return blocks * _bands(model[Model.HIDDEN])
    if stage == Stage.GATE:
        return blocks * _bands(model[Model.INTERMEDIATE])
    if stage == Stage.FEATURES:
        return num_tokens if step[Step.FEATURES] else 0
    if stage == Stage.FINAL_NORM:
        return step[Step.NUM_ROWS]
    if stage == Stage.LOGITS:
        return _blocks(step[Step.NUM_ROWS]) * _bands(model[Model.VOCAB])
    return num_tokens


@njit(error_model="numpy")
def compute_chunk(kind, model, step, layer, stage, chunk, scratch):
    """Computes one chunk of a stage; ``layer`` matters to those before :attr:`Stage.FEATURES`."""
    hidden, size, dim = model[Model.HIDDEN], item_size(kind), model[Model.HEAD_DIM]
    grouped = model[Model.GROUPED]
    table = numbers(model[Model.LAYERS] + 8 * Layer.COLUMNS * layer, Layer.COLUMNS)
    # The first row holds the final norm's.
    scales = floats(model[Model.SCALES] + 4 * Scale.COLUMNS * (layer + 1), Scale.COLUMNS)
    if stage == Stage.NORM:
        _normed_token(kind, model, step, layer, table, scales, chunk)
    elif stage == Stage.PROJECT:
        _projection(kind, model, step, table, chunk, scratch)
    elif stage == Stage.ROTATE:
        _rotated_token(kind, model, step, table, scales, chunk)
    elif stage == Stage.ATTEND or stage == Stage.JOIN:
        num_heads, num_kv_heads = model[Model.NUM_HEADS], model[Model.NUM_KV_HEADS]
        shape = (step[Step.NUM_TOKENS], num_heads, num_kv_heads, dim, model[Model.BLOCK_SIZE], model[Model.LANES])
        items = step[Step.ITEMS] if stage == Stage.ATTEND else step[Step.JOINS]
        item = numbers(items + 8 * Item.COLUMNS * chunk, Item.COLUMNS)
        span = numbers(step[Step.SPANS] + 8 * Span.COLUMNS * item[Item.SPAN], Span.COLUMNS)
        out, scaling = step[Step.MIXED], scales[Scale.SCALING]
        if stage == Stage.JOIN:
            join_splits(kind, span, item, shape, scaling, out)
        else:
            queries, keys, values = step[Step.QUERIES], table[Layer.KEYS], table[Layer.VALUES]
            attend(kind, span, item, shape, scaling, queries, keys, values, out, scratch)
    elif stage == Stage.OUTPUT:
        x, width = step[Step.MIXED], model[Model.NUM_HEADS] * dim
        weight, weight_scales, bias = table[Layer.O], table[Layer.O_SCALES], table[Layer.O_BIAS]
        _added_band(kind, step, x, width, weight, weight_scales, grouped, bias, hidden, chunk, scratch)
    elif stage == Stage.POST_NORM:
        state = floats(step[Step.STATES] + 4 * hidden * chunk, hidden)
        weight = operands(kind, table[Layer.POST_NORM], hidden)
        out = operands(kind, step[Step.NORMED] + chunk * hidden * size, hidden)
        rms_norm(kind, state, weight, scales[Scale.POST_EPS], out)
    elif stage == Stage.GATE:
        _gated_band(kind, model, step, table, chunk, scratch)
    elif stage == Stage.DOWN:
        x, width = step[Step.GATED], model[Model.INTERMEDIATE]
        weight, weight_scales, bias = table[Layer.DOWN], table[Layer.DOWN_SCALES], table[Layer.DOWN_BIAS]
        _added_band(kind, step, x, width, weight, weight_scales, grouped, bias, hidden, chunk, scratch)
    elif stage == Stage.FEATURES:
        _final_features(kind, model, step, chunk)
    elif stage == Stage.FINAL_NORM:
        token = numbers(step[Step.LOGIT_ROWS], step[Step.NUM_ROWS])[chunk]
        _final_norm(kind, model, step, token, operands(kind, step[Step.MIXED] + chunk * hidden * size, hidden))
    else:
        _logit_band(kind, model, step, chunk, scratch)
