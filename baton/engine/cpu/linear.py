"""The linear layers of a forward, a chunk at a time: some columns of the product of some tokens.

Where the CPU has a matrix unit, it computes whole bands of operand weights, see ``tiles``. Which of the two ways
computes a column depends only on the model, so that a token gets the same bits in any step.
"""

from __future__ import annotations

from numba import njit

from baton.engine.cpu.activation import gate_columns, gated_silu
from baton.engine.cpu.arithmetic import (
    add_operands,
    add_row,
    floats,
    from_operand,
    item_size,
    operands,
)
from baton.engine.cpu.products import BAND, MANY_ROWS, MOST_ROWS, band_product, band_scratch_bytes
from baton.engine.cpu.tables import Layer, Model, Step
from baton.engine.cpu.tile_bands import band_rows, scale_columns
from baton.engine.cpu.tile_products import product_alone_int8, tile_product, tile_product_bytes
from baton.engine.cpu.tiles import PAIR_BYTES, PAIRS_BYTES, PRODUCT_BYTES, STEP, TILE, multiply_pair, pack_tokens

TOKEN_BLOCK = MOST_ROWS
"""Limit for the tokens that are multiplied with a band of weights before the next band."""
_BLOCK_BYTES = 300 << 10
"""Limit for the bytes of these tokens' rows, so that they stay in the second cache beside the next band."""
_TILE_BLOCK_BYTES = 1200 << 10
"""The same limit for packed tokens: a matrix unit is so fast that weights must not be read often."""
_RESULT_BYTES = 4 * BAND * TOKEN_BLOCK


def product_scratch_bytes(widest: int, item_bytes: int, *, is_quantized: bool) -> int:
    """Memory that one thread needs for products: two bands' results, and scratch memory.

    Args:
        widest: length of the longest weight row.
        is_quantized: whether some weights are int8 or int4.
    """
    beside = band_scratch_bytes(widest, item_bytes, is_quantized=is_quantized)
    return 2 * _RESULT_BYTES + max(tile_product_bytes(widest), beside)


@njit(error_model="numpy")
def is_alone(step):
    """Whether a step has a single token, which is used without packing."""
    return step[Step.NUM_TOKENS] == 1


@njit(error_model="numpy")
def pack(model, step, x, k, token, count):
    """Packs ``count`` input tokens of a product, from a multiple of 16 on, if tiles compute it."""
    if model[Model.TILES] != 0 and not is_alone(step) and k % STEP == 0:
        pack_tokens(x + 2 * token * k, 2 * k, count, k, step[Step.PACKED] + 2 * token * k)


@njit(error_model="numpy")
def _columns_at_once(model, num_tokens):
    # Two bands and two groups of tokens: every loaded tile is multiplied twice.
    return 2 * BAND if model[Model.TILES] != 0 and num_tokens > TILE else BAND


@njit(error_model="numpy")
def _token_block(kind, model, num_tokens, k):
    """Number of tokens with rows of ``k`` that are multiplied with one band after the other."""
    if model[Model.ALL_TILED]:
        at_once = 2 * TILE
        at_most = max(1, _TILE_BLOCK_BYTES // (at_once * k * item_size(kind))) * at_once
        blocks = max(1, (num_tokens + at_most - 1) // at_most)
        return ((num_tokens + blocks - 1) // blocks + at_once - 1) // at_once * at_once
    block = TOKEN_BLOCK
    while model[Model.TILES] == 0 and block > MANY_ROWS and block * k * item_size(kind) > _BLOCK_BYTES:
        block //= 2
    return block


@njit(error_model="numpy")
def _parts(model, num_tokens, width):
    at_once = _columns_at_once(model, num_tokens)
    return (width + at_once - 1) // at_once


@njit(error_model="numpy")
def _blocks(kind, model, num_tokens, k):
    block = max(1, _token_block(kind, model, num_tokens, k))
    return (num_tokens + block - 1) // block


@njit(error_model="numpy")
def product_chunks(kind, model, num_tokens, width, k):
    """Chunks of a product ``[num_tokens, width]`` of rows of ``k``."""
    return _blocks(kind, model, num_tokens, k) * _parts(model, num_tokens, width)


@njit(error_model="numpy")
def projection_chunks(kind, model, num_tokens):
    """Chunks of the three input projections."""
    dim = model[Model.HEAD_DIM]
    q_parts = _parts(model, num_tokens, model[Model.NUM_HEADS] * dim)
    kv_parts = _parts(model, num_tokens, model[Model.NUM_KV_HEADS] * dim)
    return _blocks(kind, model, num_tokens, model[Model.INPUT]) * (q_parts + 2 * kv_parts)


@njit(error_model="numpy")
def gate_chunks(kind, model, num_tokens):
    """Chunks of ``silu(gate) * up``; each is a band of both."""
    bands = (model[Model.INTERMEDIATE] + BAND - 1) // BAND
    return _blocks(kind, model, num_tokens, model[Model.HIDDEN]) * bands


@njit(error_model="numpy")
def _product(kind, model, step, x, token, count, weight, scales, grouped, first, width, k, out, ldo, spare):
    """``width`` columns, from number ``first`` on, of the product of ``count`` tokens from number ``token`` on.

    Args:
        x: address of operands ``[num_tokens, k]``, already packed by :func:`pack`.
        out: address of float32 ``[count, width]``, ``ldo`` bytes from row to row.
        spare: address of the scratch memory after the results.
    """
    size = item_size(kind)
    done = 0
    if model[Model.TILES] != 0 and k % STEP == 0 and width >= BAND:
        packed, ldp = step[Step.PACKED] + 2 * token * k, PAIRS_BYTES
        if is_alone(step):
            packed, ldp = x, PAIR_BYTES
        weights = (weight, scales, grouped)
        tile_product(kind, False, packed, ldp, count, weights, first, width // BAND, k, out, ldo, spare)
        done = width // BAND * BAND
    while done < width:
        columns = min(BAND, width - done)
        row, place = x + token * k * size, out + 4 * done
        band_product(kind, row, k * size, count, weight, scales, grouped, first + done, columns, k, place, ldo, spare)
        done += columns


@njit(error_model="numpy")
def project(kind, model, step, table, chunk, scratch):
    """Some columns of one of the three input projections."""
    dim, length, size, num_tokens = model[Model.HEAD_DIM], model[Model.INPUT], item_size(kind), step[Step.NUM_TOKENS]
    q_width, kv_width = model[Model.NUM_HEADS] * dim, model[Model.NUM_KV_HEADS] * dim
    q_parts, kv_parts = _parts(model, num_tokens, q_width), _parts(model, num_tokens, kv_width)
    parts = q_parts + 2 * kv_parts
    block, part = chunk // parts, chunk % parts
    if part < q_parts:
        weight, scales, bias = table[Layer.Q], table[Layer.Q_SCALES], table[Layer.Q_BIAS]
        width, column = q_width, 0
    elif part < q_parts + kv_parts:
        weight, scales, bias = table[Layer.K], table[Layer.K_SCALES], table[Layer.K_BIAS]
        width, column = kv_width, q_width
        part -= q_parts
    else:
        weight, scales, bias = table[Layer.V], table[Layer.V_SCALES], table[Layer.V_BIAS]
        width, column = kv_width, q_width + kv_width
        part -= q_parts + kv_parts
    at_once = _columns_at_once(model, num_tokens)
    first = part * at_once
    count = min(at_once, width - first)
    at_most = _token_block(kind, model, num_tokens, length)
    token = block * at_most
    rows = min(at_most, num_tokens - token)
    ldo = 4 * (q_width + 2 * kv_width)
    out = step[Step.PROJECTED] + token * ldo + 4 * (column + first)
    x, grouped, spare = step[Step.NORMED], model[Model.GROUPED], scratch + 2 * _RESULT_BYTES
    _product(kind, model, step, x, token, rows, weight, scales, grouped, first, count, length, out, ldo, spare)
    if bias:
        row = operands(kind, bias + first * size, count)
        for i in range(rows):
            add_operands(kind, floats(out + i * ldo, count), row)


@njit(error_model="numpy")
def add_output(kind, model, step, table, chunk, scratch):
    """Adds some columns of attention's output to the residual stream."""
    k = model[Model.NUM_HEADS] * model[Model.HEAD_DIM]
    packed = step[Step.PACKED] if model[Model.TILES] != 0 and k % STEP == 0 else 0
    weight, scales, bias = table[Layer.O], table[Layer.O_SCALES], table[Layer.O_BIAS]
    _add_product(kind, model, step, step[Step.MIXED], packed, k, weight, scales, bias, chunk, scratch)


@njit(error_model="numpy")
def _add_product(kind, model, step, x, packed, k, weight, scales, bias, chunk, scratch):
    """Adds some columns of a product of rows of ``k`` to the residual stream.

    Args:
        x: address of operands ``[num_tokens, k]``; ``packed``: address of the packed ones, 0 if tiles do not compute
            it.
    """
    hidden, num_tokens, size = model[Model.HIDDEN], step[Step.NUM_TOKENS], item_size(kind)
    parts, at_once = _parts(model, num_tokens, hidden), _columns_at_once(model, num_tokens)
    at_most = _token_block(kind, model, num_tokens, k)
    token, first = chunk // parts * at_most, chunk % parts * at_once
    rows, count, done = min(at_most, num_tokens - token), min(at_once, hidden - first), 0
    spare, ldo, grouped = scratch + 2 * _RESULT_BYTES, 4 * hidden, model[Model.GROUPED]
    states = step[Step.STATES] + token * ldo + 4 * first
    if packed and count >= BAND:
        place, ldp = packed + 2 * token * k, PAIRS_BYTES
        if is_alone(step):
            place, ldp = x, PAIR_BYTES
        weights = (weight, scales, grouped)
        tile_product(kind, True, place, ldp, rows, weights, first, count // BAND, k, states, ldo, spare)
        done = count // BAND * BAND
    for column in range(done, count, BAND):
        columns, row = min(BAND, count - column), x + token * k * size
        band_product(
            kind, row, k * size, rows, weight, scales, grouped, first + column, columns, k, scratch, 4 * BAND, spare
        )
        for i in range(rows):
            add_row(floats(states + i * ldo + 4 * column, columns), floats(scratch + 4 * BAND * i, columns))
    if bias:
        row = operands(kind, bias + first * size, count)
        for i in range(rows):
            add_operands(kind, floats(states + i * ldo, count), row)


@njit(error_model="numpy")
def _has_tiled_mlp(model):
    """Whether tiles compute the whole MLP, so that the intermediate values stay packed."""
    return model[Model.TILES] != 0 and model[Model.HIDDEN] % STEP == 0 and model[Model.INTERMEDIATE] % STEP == 0


@njit(error_model="numpy")
def gate(kind, model, step, table, chunk, scratch):
    """``silu(gate) * up`` of a band of both."""
    hidden, width, size = model[Model.HIDDEN], model[Model.INTERMEDIATE], item_size(kind)
    num_tokens, bands = step[Step.NUM_TOKENS], (width + BAND - 1) // BAND
    at_most = _token_block(kind, model, num_tokens, hidden)
    token, first = chunk // bands * at_most, chunk % bands * BAND
    if _has_tiled_mlp(model):
        _gate_by_tiles(kind, model, step, table, token, first, scratch)
        return
    count = min(BAND, width - first)
    rows = min(at_most, num_tokens - token)
    ldx, ldo = hidden * size, 4 * BAND
    x, grouped = step[Step.NORMED] + token * ldx, model[Model.GROUPED]
    other, spare = scratch + _RESULT_BYTES, scratch + 2 * _RESULT_BYTES
    gates, scales = table[Layer.GATE], table[Layer.GATE_SCALES]
    band_product(kind, x, ldx, rows, gates, scales, grouped, first, count, hidden, scratch, ldo, spare)
    ups, scales = table[Layer.UP], table[Layer.UP_SCALES]
    band_product(kind, x, ldx, rows, ups, scales, grouped, first, count, hidden, other, ldo, spare)
    for i in range(rows):
        target = step[Step.GATED] + ((token + i) * width + first) * size
        _gate_row(kind, table, first, scratch + ldo * i, other + ldo * i, count, target)


@njit(error_model="numpy")
def _gate_row(kind, table, first, gated, up, count, out):
    if table[Layer.GATE_BIAS]:
        at = first * item_size(kind)
        add_operands(kind, floats(gated, count), operands(kind, table[Layer.GATE_BIAS] + at, count))
        add_operands(kind, floats(up, count), operands(kind, table[Layer.UP_BIAS] + at, count))
    gated_silu(kind, gated, up, count, out)


@njit(error_model="numpy")
def _gate_by_tiles(kind, model, step, table, token, first, scratch):
    """Like :func:`gate`, by tiles; products stay columns of tokens, close to the format that the next product reads."""
    k, num_tokens = model[Model.HIDDEN], step[Step.NUM_TOKENS]
    x, ldp, ldg, ldw = step[Step.PACKED] + 2 * token * k, PAIRS_BYTES, 2 * TILE * k, 2 * k
    end, grouped = min(token + _token_block(kind, model, num_tokens, k), num_tokens), model[Model.GROUPED]
    if is_alone(step):
        x, ldp = step[Step.NORMED], PAIR_BYTES
        if _are_scaled(model, table):
            up = scratch + 2 * PRODUCT_BYTES
            product_alone_int8(x, table[Layer.GATE], table[Layer.GATE_SCALES], first, k, scratch)
            product_alone_int8(x, table[Layer.UP], table[Layer.UP_SCALES], first, k, up)
            _gate_row(kind, table, first, scratch, up, BAND, step[Step.GATED] + 2 * first)
            return
    copies = scratch + 2 * _RESULT_BYTES
    worth = copies + 2 * BAND * ldw
    next_gates, next_ups = table[Layer.GATE] + (first + BAND) * ldw, table[Layer.UP] + (first + BAND) * ldw
    weights = (table[Layer.GATE], table[Layer.GATE_SCALES], grouped)
    gates = band_rows(kind, weights, first, 1, k, end - token, copies, worth)
    weights = (table[Layer.UP], table[Layer.UP_SCALES], grouped)
    ups = band_rows(kind, weights, first, 1, k, end - token, copies + BAND * ldw, worth)
    for place in range(token, end, 2 * TILE):
        # Weights that are converted to operands first have prefetched the next band already.
        groups, is_asked = 1 if end - place <= TILE else 2, table[Layer.GATE_SCALES] == 0 and place == token
        group = x + (place - token) * ldw
        multiply_pair(kind, group, ldp, ldg, groups, is_asked, gates, ups, ldw, next_gates, next_ups, k, scratch)
        if is_alone(step):
            _gate_row(kind, table, first, scratch, scratch + 4 * BAND, BAND, step[Step.GATED] + 2 * first)
        else:
            _gate_columns(kind, model, step, table, first, place, groups, scratch)


@njit(error_model="numpy")
def _are_scaled(model, table):
    return table[Layer.GATE_SCALES] != 0 and model[Model.GROUPED] == 0


@njit(error_model="numpy")
def _gate_columns(kind, model, step, table, first, token, groups, products):
    """Products ``[2, groups, 16 columns, 16 tokens]`` → packed tokens, from number ``token`` on."""
    for i in range(groups):
        gated, up = products + i * PRODUCT_BYTES, products + (groups + i) * PRODUCT_BYTES
        if _are_scaled(model, table):
            scale_columns(gated, table[Layer.GATE_SCALES] + 4 * first)
            scale_columns(up, table[Layer.UP_SCALES] + 4 * first)
        if table[Layer.GATE_BIAS]:
            _add_to_columns(kind, gated, operands(kind, table[Layer.GATE_BIAS] + 2 * first, BAND))
            _add_to_columns(kind, up, operands(kind, table[Layer.UP_BIAS] + 2 * first, BAND))
        place = (token + i * TILE) * model[Model.INTERMEDIATE] + first * TILE
        gate_columns(gated, up, step[Step.GATED] + 2 * place)


@njit(error_model="numpy")
def _add_to_columns(kind, product, bias):
    for column in range(bias.size):
        values = floats(product + 4 * TILE * column, TILE)
        for token in range(TILE):
            values[token] += from_operand(kind, bias[column])


@njit(error_model="numpy")
def add_down(kind, model, step, table, chunk, scratch):
    """Adds some columns of the MLP's output to the residual stream."""
    packed = step[Step.GATED] if _has_tiled_mlp(model) else 0
    weight, scales, bias = table[Layer.DOWN], table[Layer.DOWN_SCALES], table[Layer.DOWN_BIAS]
    k = model[Model.INTERMEDIATE]
    _add_product(kind, model, step, step[Step.GATED], packed, k, weight, scales, bias, chunk, scratch)


@njit(error_model="numpy")
def logits(kind, model, step, chunk, scratch):
    """Computes some columns of the logits."""
    hidden, width, size, num_rows = model[Model.HIDDEN], model[Model.VOCAB], item_size(kind), step[Step.NUM_ROWS]
    parts, at_once = _parts(model, num_rows, width), _columns_at_once(model, num_rows)
    at_most = _token_block(kind, model, num_rows, hidden)
    row, first = chunk // parts * at_most, chunk % parts * at_once
    rows, count, ldo = min(at_most, num_rows - row), min(at_once, width - first), 4 * width
    out = step[Step.LOGITS] + row * ldo + 4 * first
    x, weight, scales = step[Step.MIXED], model[Model.LM_HEAD], model[Model.LM_HEAD_SCALES]
    spare = scratch + 2 * _RESULT_BYTES
    _product(kind, model, step, x, row, rows, weight, scales, 0, first, count, hidden, out, ldo, spare)
    if model[Model.LM_HEAD_BIAS]:
        bias = operands(kind, model[Model.LM_HEAD_BIAS] + first * size, count)
        for i in range(rows):
            add_operands(kind, floats(out + i * ldo, count), bias)
