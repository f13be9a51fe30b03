"""Runs one compiled program over one cache: fills the tables, runs the threads, returns logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch.attention_groups import Span
from baton.engine.cpu.attention import max_rows
from baton.engine.cpu.attention_plan import AttentionPlan
from baton.engine.cpu.build import load_program
from baton.engine.cpu.emitter import lanes
from baton.engine.cpu.rotary import RotaryTable
from baton.engine.cpu.structure import Decoder, DecoderLayer
from baton.engine.cpu.tables import Layer, Model, Scale, Step
from baton.engine.cpu.threads import ThreadPool
from baton.engine.cpu.tiles import STEP, TILE, has_tiles, tile_configurations
from baton.engine.cpu.workspace import Workspace

Table = npt.NDArray[np.int64]

MAX_THREADS = 64
"""Limit for the threads of one forward, however many torch may use."""


class FusedForward:
    """Computes forwards with the weights in place. Forwards must not overlap.

    Args:
        keys, values: tensors of each layer in the layout of ``paged_cache``, all in one encoding; they must outlive all
            forwards.
        block_size: tokens per block of the cache.
        feature_columns: int64 ``[num_layers + 2]``: column of each hidden state among the features, see
            :attr:`baton.engine.cpu.tables.Model.FEATURES`; -1 for unused ones.
        tiles: whether bfloat16 products use the CPU's matrix unit, if it has one.

    Raises:
        NotFusableError: the program cannot be compiled here.
    """

    def __init__(
        self,
        decoder: Decoder,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        block_size: int,
        feature_columns: Table,
        *,
        tiles: bool = True,
    ) -> None:
        serve = load_program(decoder.embedding.dtype)
        self._decoder = decoder
        self._rotary = RotaryTable(decoder.rotary, decoder.head_dim)
        self._columns = feature_columns
        self._num_features = int((feature_columns >= 0).sum())
        tables = zip(decoder.layers, keys, values, strict=True)
        self._layers = np.array([_layer_row(*each) for each in tables], dtype=np.int64)
        self._scales = np.array(_scale_rows(decoder), dtype=np.float32)
        self._model = _model_row(decoder, block_size, lanes())
        self._model[Model.LAYERS], self._model[Model.SCALES] = self._layers.ctypes.data, self._scales.ctypes.data
        self._model[Model.FEATURES] = self._columns.ctypes.data
        self._model[Model.INT8_CACHE] = keys[0].dtype == torch.int8
        self._tiles = tile_configurations()
        if tiles and has_tiles() and decoder.embedding.dtype == torch.bfloat16:
            self._model[Model.TILES], self._model[Model.ALL_TILED] = self._tiles.ctypes.data, _fills_tiles(decoder)
        self._step = np.zeros(Step.COLUMNS, dtype=np.int64)
        self._workspace = Workspace(decoder)
        rows = max_rows(int(self._model[Model.TILES]), decoder.head_dim)
        self._attention = AttentionPlan(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, rows)
        self._pool = ThreadPool(serve, self._model.ctypes.data, self._step.ctypes.data, MAX_THREADS)

    @property
    def has_tiles(self) -> bool:
        """Whether a matrix unit computes the products."""
        return bool(self._model[Model.TILES])

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[Span],
        logit_rows: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes tokens and stores their KV.

        Args:
            token_ids, positions, slots: int64 ``[num_tokens]``.
            spans: spans of these tokens, in their order.
            logit_rows: int64 ``[num_rows]``, tokens whose logits are needed.
            hidden: ``[num_tokens, hidden_size]`` in the weights' dtype, the states that an EAGLE-3 head reads beside
                the tokens.

        Returns:
            Logits, float32 ``[num_rows, vocab_size]``, and the features ``[num_tokens, num_features * hidden_size]``.
        """
        num_tokens, num_rows = len(token_ids), len(logit_rows)
        num_threads = min(torch.get_num_threads(), MAX_THREADS)
        size, vocab = self._decoder.embedding.shape[1], self._decoder.lm_head.weight.shape[0]
        logits = torch.empty(num_rows, vocab)
        features = torch.empty(num_tokens, self._num_features * size, dtype=self._decoder.embedding.dtype)
        cos, sin = self._rotary.at(positions)
        attention = self._attention.tables(spans, num_threads)
        step = self._step
        self._workspace.fill(step, num_tokens, num_threads)
        step[Step.NUM_TOKENS], step[Step.NUM_ROWS] = num_tokens, num_rows
        step[Step.NUM_ITEMS], step[Step.NUM_JOINS] = len(attention.items), len(attention.joins)
        step[Step.TOKEN_IDS], step[Step.SLOTS] = token_ids.data_ptr(), slots.data_ptr()
        step[Step.COS], step[Step.SIN] = cos.data_ptr(), sin.data_ptr()
        step[Step.LOGIT_ROWS], step[Step.LOGITS] = logit_rows.data_ptr(), logits.data_ptr()
        step[Step.SPANS] = attention.spans.ctypes.data
        step[Step.ITEMS], step[Step.JOINS] = attention.items.ctypes.data, attention.joins.ctypes.data
        step[Step.FEATURES] = features.data_ptr() if self._num_features else 0
        step[Step.NUM_FEATURES] = self._num_features
        step[Step.HIDDEN] = 0 if hidden is None else hidden.data_ptr()
        self._pool.run(num_threads)
        return logits, features

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()


def _fills_tiles(decoder: Decoder) -> bool:
    """Whether all weights consist of whole tiles."""
    dim, hidden, vocab = decoder.head_dim, decoder.embedding.shape[1], decoder.lm_head.weight.shape[0]
    read = (decoder.input_size, decoder.num_heads * dim, hidden, decoder.intermediate_size)
    written = (decoder.num_heads * dim, decoder.num_kv_heads * dim, hidden, decoder.intermediate_size, vocab)
    return all(k % STEP == 0 for k in read) and all(rows % TILE == 0 for rows in written)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _layer_row(layer: DecoderLayer, keys: torch.Tensor, values: torch.Tensor) -> list[int]:
    row = [0] * Layer.COLUMNS
    linears = {
        Layer.Q: layer.q,
        Layer.K: layer.k,
        Layer.V: layer.v,
        Layer.O: layer.o,
        Layer.GATE: layer.gate,
        Layer.UP: layer.up,
        Layer.DOWN: layer.down,
    }
    scales = {
        Layer.Q_SCALES: layer.q,
        Layer.K_SCALES: layer.k,
        Layer.V_SCALES: layer.v,
        Layer.O_SCALES: layer.o,
        Layer.GATE_SCALES: layer.gate,
        Layer.UP_SCALES: layer.up,
        Layer.DOWN_SCALES: layer.down,
    }
    biases = {
        Layer.Q_BIAS: layer.q,
        Layer.K_BIAS: layer.k,
        Layer.V_BIAS: layer.v,
        Layer.O_BIAS: layer.o,
        Layer.GATE_BIAS: layer.gate,
        Layer.UP_BIAS: layer.up,
        Layer.DOWN_BIAS: layer.down,
    }
    norms = {
        Layer.INPUT_NORM: layer.input_norm,
        Layer.POST_NORM: layer.post_norm,
        Layer.Q_NORM: layer.q_norm,
        Layer.K_NORM: layer.k_norm,
        Layer.HIDDEN_NORM: layer.hidden_norm,
    }
    for column, linear in linears.items():
        row[column] = linear.weight.data_ptr()
    for column, linear in scales.items():
        row[column] = _address(linear.scales)
    for column, linear in biases.items():
        row[column] = _address(linear.bias)
    for column, norm in norms.items():
        row[column] = 0 if norm is None else norm.weight.data_ptr()
    row[Layer.KEYS], row[Layer.VALUES] = keys.data_ptr(), values.data_ptr()
    return row


def _scale_rows(decoder: Decoder) -> list[list[float]]:
    rows = [[decoder.final_norm.eps] + [0.0] * (Scale.COLUMNS - 1)]
    for layer in decoder.layers:
        row = [0.0] * Scale.COLUMNS
        row[Scale.INPUT_EPS], row[Scale.POST_EPS] = layer.input_norm.eps, layer.post_norm.eps
        row[Scale.Q_EPS] = layer.q_norm.eps if layer.q_norm else 0.0
        row[Scale.K_EPS] = layer.k_norm.eps if layer.k_norm else 0.0
        row[Scale.HIDDEN_EPS] = layer.hidden_norm.eps if layer.hidden_norm else 0.0
        row[Scale.SCALING] = layer.scaling
        rows.append(row)
    return rows


def _model_row(decoder: Decoder, block_size: int, lanes: int) -> Table:
    """The model's table, without the addresses of the tables that it points to."""
    row = np.zeros(Model.COLUMNS, dtype=np.int64)
    row[Model.NUM_LAYERS], row[Model.HIDDEN] = len(decoder.layers), decoder.embedding.shape[1]
    row[Model.NUM_HEADS], row[Model.NUM_KV_HEADS] = decoder.num_heads, decoder.num_kv_heads
    row[Model.HEAD_DIM], row[Model.INTERMEDIATE] = decoder.head_dim, decoder.intermediate_size
    row[Model.VOCAB], row[Model.BLOCK_SIZE], row[Model.LANES] = decoder.lm_head.weight.shape[0], block_size, lanes
    row[Model.EMBEDDING], row[Model.FINAL_NORM] = decoder.embedding.data_ptr(), decoder.final_norm.weight.data_ptr()
    row[Model.LM_HEAD], row[Model.LM_HEAD_BIAS] = decoder.lm_head.weight.data_ptr(), _address(decoder.lm_head.bias)
    row[Model.LM_HEAD_SCALES], row[Model.GROUPED] = _address(decoder.lm_head.scales), decoder.is_grouped
    row[Model.INPUT], row[Model.NORMED_RESIDUAL] = decoder.input_size, decoder.normed_residual
    return row
