"""The computation of each stage of a forward, one chunk at a time."""

from __future__ import annotations

from numba import njit

from baton.engine.cpu.arithmetic import (
    floats,
    item_size,
    numbers,
    operands,
    rms_norm,
    rms_norm_in_place,
    rotate,
    rotate_in_place,
    round_row,
    widen_row,
)
from baton.engine.cpu.attention import attend, join_splits
from baton.engine.cpu.int8_rows import pack_row, row_bytes
from baton.engine.cpu.linear import (
    add_down,
    add_output,
    gate,
    gate_chunks,
    is_alone,
    logits,
    pack,
    product_chunks,
    project,
    projection_chunks,
)
from baton.engine.cpu.tables import Item, Layer, Model, Scale, Span, Stage, Step
from baton.engine.cpu.tiles import TILE


@njit(error_model="numpy")
def _tokens_at_once(model):
    # A tile of tokens is packed right after it is computed, in the same chunk.
    return TILE if model[Model.TILES] else 1


@njit(error_model="numpy")
def _token_chunks(model, num_tokens):
    at_once = _tokens_at_once(model)
    return (num_tokens + at_once - 1) // at_once


@njit(error_model="numpy")
def _normed_tokens(kind, model, step, layer, table, scales, chunk):
    num_tokens, first = step[Step.NUM_TOKENS], chunk * _tokens_at_once(model)
    count = min(_tokens_at_once(model), num_tokens - first)
    for token in range(first, first + count):
        _normed_token(kind, model, step, layer, table, scales, token)
    pack(model, step, step[Step.NORMED], model[Model.INPUT], first, count)


@njit(error_model="numpy")
def _post_normed_tokens(kind, model, step, table, scales, chunk):
    num_tokens, first = step[Step.NUM_TOKENS], chunk * _tokens_at_once(model)
    count, hidden = min(_tokens_at_once(model), num_tokens - first), model[Model.HIDDEN]
    weight = operands(kind, table[Layer.POST_NORM], hidden)
    for token in range(first, first + count):
        state = floats(step[Step.STATES] + 4 * hidden * token, hidden)
        out = operands(kind, step[Step.NORMED] + token * hidden * item_size(kind), hidden)
        rms_norm(kind, state, weight, scales[Scale.POST_EPS], out)
    pack(model, step, step[Step.NORMED], hidden, first, count)


@njit(error_model="numpy")
def _final_normed_rows(kind, model, step, chunk):
    num_rows, first = step[Step.NUM_ROWS], chunk * _tokens_at_once(model)
    count, hidden = min(_tokens_at_once(model), num_rows - first), model[Model.HIDDEN]
    tokens = numbers(step[Step.LOGIT_ROWS], num_rows)
    for row in range(first, first + count):
        out = operands(kind, step[Step.MIXED] + row * hidden * item_size(kind), hidden)
        _final_norm(kind, model, step, tokens[row], out)
    pack(model, step, step[Step.MIXED], hidden, first, count)


@njit(error_model="numpy")
def _packed_tokens(model, step, chunk):
    """Packs the output of attention."""
    num_tokens, first = step[Step.NUM_TOKENS], chunk * TILE
    width = model[Model.NUM_HEADS] * model[Model.HEAD_DIM]
    pack(model, step, step[Step.MIXED], width, first, min(TILE, num_tokens - first))


@njit(error_model="numpy")
def _normed_token(kind, model, step, layer, table, scales, token):
    """Embeds a token (before the first layer), keeps the state if it is a feature, and norms it for the layer."""
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
    """Norms the hidden state of a token; the state, or its norm, starts the residual stream."""
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
        key = floats(row + 4 * dim * (num_heads + head), dim)
        value = floats(row + 4 * dim * (num_heads + num_kv_heads + head), dim)
        if table[Layer.K_NORM]:
            rms_norm_in_place(kind, key, operands(kind, table[Layer.K_NORM], dim), scales[Scale.K_EPS])
        if model[Model.INT8_CACHE]:
            place = (slot * num_kv_heads + head) * row_bytes(dim)
            rotate_in_place(key, cos, sin)
            pack_row(key, table[Layer.KEYS] + place)
            pack_row(value, table[Layer.VALUES] + place)
        else:
            place = (slot * num_kv_heads + head) * dim * size
            rotate(kind, key, cos, sin, operands(kind, table[Layer.KEYS] + place, dim))
            round_row(kind, value, operands(kind, table[Layer.VALUES] + place, dim))


@njit(error_model="numpy")
def _final_features(kind, model, step, token):
    """Keeps the last layer's output, before and after the final norm, where these are features."""
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
def num_chunks(kind, model, step, stage):
    """Number of a stage's chunks, which may be computed in any order."""
    num_tokens = step[Step.NUM_TOKENS]
    if stage == Stage.PROJECT:
        return projection_chunks(kind, model, num_tokens)
    if stage == Stage.ATTEND:
        return step[Step.NUM_ITEMS]
    if stage == Stage.JOIN:
        return step[Step.NUM_JOINS]
    if stage == Stage.PACK:
        return _token_chunks(model, num_tokens) if model[Model.TILES] != 0 and not is_alone(step) else 0
    if stage == Stage.OUTPUT:
        return product_chunks(
            kind, model, num_tokens, model[Model.HIDDEN], model[Model.NUM_HEADS] * model[Model.HEAD_DIM]
        )
    if stage == Stage.DOWN:
        return product_chunks(kind, model, num_tokens, model[Model.HIDDEN], model[Model.INTERMEDIATE])
    if stage == Stage.GATE:
        return gate_chunks(kind, model, num_tokens)
    if stage == Stage.NORM or stage == Stage.POST_NORM:
        return _token_chunks(model, num_tokens)
    if stage == Stage.FEATURES:
        return num_tokens if step[Step.FEATURES] else 0
    if stage == Stage.FINAL_NORM:
        return _token_chunks(model, step[Step.NUM_ROWS])
    if stage == Stage.LOGITS:
        return product_chunks(kind, model, step[Step.NUM_ROWS], model[Model.VOCAB], model[Model.HIDDEN])
    return num_tokens


@njit(inline="always", error_model="numpy")
def compute_chunk(kind, model, step, layer, stage, chunk, scratch):
    """Computes one chunk of a stage; ``layer`` is only used by stages before :attr:`Stage.FEATURES`."""
    table = numbers(model[Model.LAYERS] + 8 * Layer.COLUMNS * layer, Layer.COLUMNS)
    # The first row holds the final norm's eps.
    scales = floats(model[Model.SCALES] + 4 * Scale.COLUMNS * (layer + 1), Scale.COLUMNS)
    if stage == Stage.NORM:
        _normed_tokens(kind, model, step, layer, table, scales, chunk)
    elif stage == Stage.PROJECT:
        project(kind, model, step, table, chunk, scratch)
    elif stage == Stage.ROTATE:
        _rotated_token(kind, model, step, table, scales, chunk)
    elif stage == Stage.ATTEND or stage == Stage.JOIN:
        num_heads, num_kv_heads, dim = model[Model.NUM_HEADS], model[Model.NUM_KV_HEADS], model[Model.HEAD_DIM]
        tiles = model[Model.TILES]
        shape = (
            step[Step.NUM_TOKENS],
            num_heads,
            num_kv_heads,
            dim,
            model[Model.BLOCK_SIZE],
            model[Model.LANES],
            tiles,
            model[Model.INT8_CACHE],
        )
        items = step[Step.ITEMS] if stage == Stage.ATTEND else step[Step.JOINS]
        item = numbers(items + 8 * Item.COLUMNS * chunk, Item.COLUMNS)
        span = numbers(step[Step.SPANS] + 8 * Span.COLUMNS * item[Item.SPAN], Span.COLUMNS)
        out, scaling = step[Step.MIXED], scales[Scale.SCALING]
        if stage == Stage.JOIN:
            join_splits(kind, span, item, shape, scaling, out)
        else:
            queries, keys, values = step[Step.QUERIES], table[Layer.KEYS], table[Layer.VALUES]
            attend(kind, span, item, shape, scaling, queries, keys, values, out, scratch)
    elif stage == Stage.PACK:
        _packed_tokens(model, step, chunk)
    elif stage == Stage.OUTPUT:
        add_output(kind, model, step, table, chunk, scratch)
    elif stage == Stage.POST_NORM:
        _post_normed_tokens(kind, model, step, table, scales, chunk)
    elif stage == Stage.GATE:
        gate(kind, model, step, table, chunk, scratch)
    elif stage == Stage.DOWN:
        add_down(kind, model, step, table, chunk, scratch)
    elif stage == Stage.FEATURES:
        _final_features(kind, model, step, chunk)
    elif stage == Stage.FINAL_NORM:
        _final_normed_rows(kind, model, step, chunk)
    else:
        logits(kind, model, step, chunk, scratch)
