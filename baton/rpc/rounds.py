"""Rounds in messages, and their checks at the other end."""

from __future__ import annotations

from math import isfinite

from baton.core.errors import InternalError
from baton.core.rounds import MAX_NODES, Round
from baton.rpc.wire import worker_pb2

_MAX_METHOD_CHARS = 64
_NO_PARENT = -1


def pack_round(one: Round) -> worker_pb2.Round:
    return worker_pb2.Round(
        draft=one.draft,
        parents=one.parents,
        accepted=one.accepted,
        draft_s=one.draft_s,
        verify_s=one.verify_s,
        num_sequences=one.num_sequences,
    )


def unpack_round(batch: worker_pb2.TokenBatch, vocab_size: int) -> Round | None:
    """The round of a traced sequence's batch; ``None`` if the batch has no tokens.

    Args:
        vocab_size: upper bound of token ids.

    Raises:
        InternalError: there is no round, or it is impossible.
    """
    if not batch.token_ids:
        return None
    if not batch.HasField("round"):
        raise InternalError("A worker sent tokens of a traced request without their round.")
    message = batch.round
    if len(message.draft) > MAX_NODES or len(message.accepted) > len(message.draft):
        raise _damaged(f"{len(message.draft)} drafted and {len(message.accepted)} accepted tokens")
    found = Round(
        tuple(batch.token_ids),
        batch.drafted_by,
        tuple(message.draft),
        tuple(message.parents),
        tuple(message.accepted),
        message.draft_s,
        message.verify_s,
        message.num_sequences,
    )
    if problem := _problem(found, batch.num_drafted, vocab_size):
        raise _damaged(problem)
    return found


def _damaged(problem: str) -> InternalError:
    return InternalError(f"A worker sent a round that is impossible: {problem}.")


def _problem(found: Round, num_drafted: int, vocab_size: int) -> str:
    """What is wrong; empty if nothing is."""
    num_nodes = len(found.draft)
    if not num_nodes == len(found.parents) == num_drafted:
        return f"{num_nodes} drafted tokens and {len(found.parents)} parents in a batch with {num_drafted} drafts"
    if len(found.method) > _MAX_METHOD_CHARS:
        return f"a method's name has more than {_MAX_METHOD_CHARS} characters"
    if any(token >= vocab_size for token in (*found.draft, *found.token_ids)):
        return "a token is not in the vocabulary"
    if any(not _NO_PARENT <= parent < node for node, parent in enumerate(found.parents)):
        return "a drafted token does not come behind its parent"
    if any(node >= num_nodes for node in found.accepted):
        return "an accepted token was not drafted"
    if tuple(found.parents[node] for node in found.accepted) != (_NO_PARENT, *found.accepted)[: len(found.accepted)]:
        return "the accepted tokens are no path"
    num_kept = min(len(found.accepted), len(found.token_ids))
    accepted = tuple(found.draft[node] for node in found.accepted)
    if len(found.token_ids) > len(accepted) + 1 or found.token_ids[:num_kept] != accepted[:num_kept]:
        return "its tokens are not those that were accepted"
    if not all(isfinite(seconds) and seconds >= 0 for seconds in (found.draft_s, found.verify_s)):
        return "a duration is not a number from 0 on"
    return ""
