"""Shadow mode: measures how often a method's drafts would be accepted, without verifying them.

In a share of the steps the method drafts for sequences that do not speculate. The tokens that plain decoding then gives
them are compared with the draft, token by token over the next steps. No token depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.drafts import ROOT, Draft
from baton.core.request import Request
from decode_worker.speculation.draft_figures import DraftFigures, TrafficKind, traffic_kind


@dataclass(slots=True)
class _Followed:
    """A draft, and the path through it that the tokens so far have taken."""

    draft: Draft
    kind: TrafficKind
    path: list[int] = field(default_factory=list)

    def follow(self, token: int) -> bool:
        """Goes on to the child with this token; ``False`` if there is none."""
        last = self.path[-1] if self.path else ROOT
        for node in range(last + 1, len(self.draft)):
            if self.draft.parent(node) == last and self.draft.token_ids[node] == token:
                self.path.append(node)
                return True
        return False

    @property
    def has_ended(self) -> bool:
        """Whether the path is at a leaf."""
        last = self.path[-1] if self.path else ROOT
        return all(self.draft.parent(node) != last for node in range(last + 1, len(self.draft)))


class ShadowDrafts:
    """The drafts of one method in shadow mode, and what became of them.

    Args:
        method: the method's name.
        share: of the steps in which it drafts, in (0, 1].
    """

    def __init__(self, method: str, share: float) -> None:
        self.method = method
        self.figures = DraftFigures()
        self._pause = round(1 / share) - 1
        self._num_skipped = 0
        self._followed: dict[str, _Followed] = {}

    @property
    def is_due(self) -> bool:
        """Whether the method drafts in the next step."""
        return self._num_skipped >= self._pause

    def skip(self) -> None:
        """Counts a step without drafts."""
        self._num_skipped += 1

    def begin(self) -> None:
        """Counts a step with drafts."""
        self._num_skipped = 0

    def is_followed(self, request_id: str) -> bool:
        """Whether an earlier draft for the request is still being compared."""
        return request_id in self._followed

    def keep(self, request: Request, draft: Draft) -> None:
        """Begins to compare a draft with the tokens to come."""
        self._followed[request.request_id] = _Followed(draft, traffic_kind(request))

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Compares the next tokens of a request."""
        followed = self._followed.get(request_id)
        if followed is None:
            return
        for token in token_ids:
            is_right = followed.follow(token)
            if not is_right or followed.has_ended:
                del self._followed[request_id]
                self._judge(followed, has_failed=not is_right)
                return

    def release(self, request_id: str) -> None:
        """Judges the draft of a request that ended by the tokens that it got."""
        followed = self._followed.pop(request_id, None)
        if followed is not None and followed.path:
            self._judge(followed, has_failed=False)

    def _judge(self, followed: _Followed, *, has_failed: bool) -> None:
        num_right = len(followed.path)
        self.figures.judged(followed.kind, len(followed.draft), num_right, num_right + has_failed)
