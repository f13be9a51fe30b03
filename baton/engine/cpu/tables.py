"""Columns of the tables through which Python passes a forward's inputs to compiled code.

Addresses and sizes are int64; strides follow from the sizes, since every tensor is contiguous.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Stages of a forward: those of every layer, then those after the last one."""

    NORM = 0
    PROJECT = 1
    ROTATE = 2
    ATTEND = 3
    JOIN = 4
    PACK = 5
    OUTPUT = 6
    POST_NORM = 7
    GATE = 8
    DOWN = 9
    FEATURES = 10
    FINAL_NORM = 11
    LOGITS = 12


class Model(IntEnum):
    """Constant sizes and addresses of the model, int64."""

    NUM_LAYERS = 0
    HIDDEN = 1
    NUM_HEADS = 2
    NUM_KV_HEADS = 3
    HEAD_DIM = 4
    INTERMEDIATE = 5
    VOCAB = 6
    BLOCK_SIZE = 7
    LANES = 8
    EMBEDDING = 9
    FINAL_NORM = 10
    LM_HEAD = 11
    LM_HEAD_BIAS = 12
    LAYERS = 13  # int64 [NUM_LAYERS, Layer.COLUMNS]
    SCALES = 14  # float32 [1 + NUM_LAYERS, Scale.COLUMNS]; the first row has only the final norm's eps
    FEATURES = 15  # int64 [NUM_LAYERS + 2]: column of each hidden state among the features, the normed one last; or -1
    INPUT = 16  # width of the input of a layer's projections: HIDDEN, or twice as much in an EAGLE-3 head
    NORMED_RESIDUAL = 17  # 1: the residual stream of such a head starts with the normed hidden state
    LM_HEAD_SCALES = 18
    GROUPED = 19  # 1: the layers' weights are int4; the head's never are
    TILES = 20  # address of the tiles' configurations; 0: products do not use tiles, see baton.engine.cpu.tiles
    INT8_CACHE = 21  # 1: keys and values are rows of baton.engine.cpu.int8_rows
    ALL_TILED = 22  # 1: all products use tiles
    COLUMNS = 23


class Layer(IntEnum):
    """Addresses of a layer's weights and of its cache; 0 for missing ones.

    Scales are float32, one for each row of an int8 weight; see :class:`baton.engine.cpu.structure.Linear` for int4.
    """

    INPUT_NORM = 0
    Q = 1
    K = 2
    V = 3
    O = 4  # noqa: E741 - the common name
    POST_NORM = 5
    GATE = 6
    UP = 7
    DOWN = 8
    Q_BIAS = 9
    K_BIAS = 10
    V_BIAS = 11
    O_BIAS = 12
    GATE_BIAS = 13
    UP_BIAS = 14
    DOWN_BIAS = 15
    Q_NORM = 16
    K_NORM = 17
    KEYS = 18
    VALUES = 19
    HIDDEN_NORM = 20  # only for an EAGLE-3 head, which reads a hidden state beside each token's embedding
    Q_SCALES = 21
    K_SCALES = 22
    V_SCALES = 23
    O_SCALES = 24
    GATE_SCALES = 25
    UP_SCALES = 26
    DOWN_SCALES = 27
    COLUMNS = 28


class Scale(IntEnum):
    """float32 numbers of a layer."""

    INPUT_EPS = 0
    POST_EPS = 1
    Q_EPS = 2
    K_EPS = 3
    SCALING = 4
    HIDDEN_EPS = 5
    COLUMNS = 6


class Step(IntEnum):
    """Sizes and addresses that change with every forward, int64."""

    NUM_TOKENS = 0
    NUM_ROWS = 1
    HIDDEN = 2  # operands [num_tokens, hidden]: the hidden states that an EAGLE-3 head reads beside the tokens
    NUM_ITEMS = 3
    TOKEN_IDS = 4
    SLOTS = 5
    COS = 6  # float32 [num_tokens, head_dim / 2]
    SIN = 7
    LOGIT_ROWS = 8
    SPANS = 9
    ITEMS = 10
    LOGITS = 11  # float32 [num_rows, vocab]
    FEATURES = 12  # operands [num_tokens, num_features * hidden]; 0 without features
    NUM_FEATURES = 13
    STATES = 14  # float32 [num_tokens, hidden]: the residual stream
    NORMED = 15  # operands [num_tokens, input], or [num_tokens, hidden] before the MLP
    PROJECTED = 16  # float32 [num_tokens, (heads + 2 * kv_heads) * head_dim]
    QUERIES = 17  # operands [kv_heads, num_tokens, share, head_dim]
    MIXED = 18  # operands [num_tokens, heads * head_dim]
    GATED = 19  # operands [num_tokens, intermediate]; packed where tiles compute the next product
    SCRATCH = 20
    SCRATCH_BYTES = 21  # bytes of each thread
    COUNTERS = 22
    NUM_THREADS = 23
    JOINS = 24  # items whose splits are joined
    NUM_JOINS = 25
    PACKED = 26  # input of the next product, packed for tiles, see baton.engine.cpu.tiles
    COLUMNS = 27


class Span(IntEnum):
    """New tokens of one sequence."""

    BLOCKS = 0  # address of its block ids, int64
    START = 1  # place of its first new token
    FIRST_TOKEN = 2  # row of that token in the batch
    TREE_START = 3  # place of the first token of its tree; after the last place without one
    PATHS = 4  # address of int64 [new tokens, PATH_SIZE]: places of a token's ancestors in the tree, then its own
    PATH_SIZE = 5
    VISIBLE = 6  # with a tree: address of int64 [new tokens], the keys that each sees
    FIRST_KEY = 7  # place of the first key that may be attended to
    COLUMNS = 8


class Item(IntEnum):
    """A piece of attention that one thread computes."""

    SPAN = 0
    HEAD = 1  # first KV head
    FIRST = 2  # first query, counted from the span's first token
    COUNT = 3
    END = 4  # keys that the query with the most visible keys sees
    STATE = 5  # address of a split's state; 0: the item covers all of its keys
    SPLIT = 6  # number of the split; in JOINS, the number of splits
    HEADS = 7  # KV heads
    COLUMNS = 8


class Pool(IntEnum):
    """Memory that threads share, int64; values that change while threads run are on cache lines of their own."""

    MODEL = 0  # address of the table
    STEP = 1
    NUM_THREADS = 2
    STOPPED = 3
    OPEN = 8  # 1 while a forward may be joined
    ACTIVE = 16  # helpers that are computing
    SEMAPHORES = 24  # one of libc's for each helper, on a line of its own
    LINE = 8
