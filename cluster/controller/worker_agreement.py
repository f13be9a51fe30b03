"""What all workers of a cluster must have in common."""

from __future__ import annotations

from baton.core.errors import LayoutMismatchError
from cluster.registry.workers import WorkerInfo


class WorkerAgreement:
    """Checks workers that become ready against those before them.

    Attributes:
        kv_fingerprint: the KV layout of workers that start now; ``None``: the next one decides. An upgrade changes it.
    """

    def __init__(self) -> None:
        self.kv_fingerprint: str | None = None
        self._card: tuple[str, int, tuple[int, ...]] | None = None

    def check(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        """Raises :class:`LayoutMismatchError` for a worker that does not fit the others.

        Args:
            is_outdated: the worker will be replaced, so that it may have another KV layout; routers never pair it with
                the others then.
        """
        card = (info.model_name, info.vocab_size, info.eos_token_ids)
        if self._card is None:
            self._card = card
        if card != self._card:
            raise LayoutMismatchError(
                f"{info.worker_id} serves {_describe(card)}, but the cluster serves {_describe(self._card)}. Keep "
                "served_model_name and a model with the same vocabulary, or start another cluster."
            )
        if is_outdated:
            return
        if self.kv_fingerprint is None:
            self.kv_fingerprint = info.kv_fingerprint
        if info.kv_fingerprint != self.kv_fingerprint:
            raise LayoutMismatchError(
                f"{info.worker_id} ({info.dtype}, blocks of {info.block_size}) has a different KV layout than earlier "
                "workers. All workers must run the same model, dtype and engine section; set dtype explicitly "
                "when the pools run on different devices."
            )


def _describe(card: tuple[str, int, tuple[int, ...]]) -> str:
    name, vocab_size, eos_token_ids = card
    return f"{name} ({vocab_size} tokens, end tokens {', '.join(map(str, eos_token_ids))})"
