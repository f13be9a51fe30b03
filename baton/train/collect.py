"""Lets the target answer prompts in batches and stores the answers. Resumable; see :mod:`baton.train.dataset`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.errors import ConfigError, InternalError
from baton.core.request import FinishReason, Request, SamplingParams, TokenOutput
from baton.engine.engine import Engine
from baton.train.dataset import AnswerDataset, Sample
from baton.train.prompts import PromptFormat, Turns, is_usable_turn
from baton.train.stopping import Stop, check, never

_SHARD_SAMPLES = 64
_MAX_FRUITLESS_JOBS = 2000
_TURN_TEMPERATURE = 0.9
_TURN_TOP_K = 50
_MIN_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """Settings of the collection of answers.

    Attributes:
        num_tokens: number of answer tokens to collect.
        max_answer_tokens: length limit of an answer.
        max_prompt_tokens: longer prompts are left out.
        max_turn_tokens: length limit of a user turn that the target writes.
        temperatures: used in turn; 0 is greedy.
        self_prompt_share: share of the prompts that the target writes itself.
        batch_size: number of concurrent conversations.
    """

    num_tokens: int
    max_answer_tokens: int = 320
    max_prompt_tokens: int = 512
    max_turn_tokens: int = 300
    temperatures: tuple[float, ...] = (0.0, 0.8)
    self_prompt_share: float = 0.5
    batch_size: int = 48
    seed: int = 0


@dataclass(slots=True)
class _Job:
    """A user turn to be sampled, or a prompt to be answered.

    Attributes:
        turns: the conversation up to the answer.
        further: the user's turns after the answer.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    is_turn: bool
    turns: Turns = ()
    further: Turns = ()
    token_ids: list[int] = field(default_factory=list)


class Collector:
    """Fills a dataset.

    Args:
        engine: an engine of the target without other requests.
        prompts: the user's turns of each conversation, used once in order, then again with other seeds.
        report: called after each answer with the number of answer tokens so far.
        stop: checked after each engine step.

    Raises:
        ConfigError: there are no prompts, and the target cannot write any.
    """

    def __init__(
        self,
        engine: Engine,
        chat: PromptFormat,
        eos_token_ids: frozenset[int],
        prompts: Sequence[Turns],
        dataset: AnswerDataset,
        settings: CollectSettings,
        report: Callable[[int], None] = lambda num_tokens: None,
        stop: Stop = never,
    ) -> None:
        if not prompts and chat.before_user is None:
            raise ConfigError(
                "training data: the target has no chat template, so it cannot write prompts; give prompts."
            )
        self._engine = engine
        self._chat = chat
        self._eos_token_ids = eos_token_ids
        self._prompts = prompts
        self._dataset = dataset
        self._settings = settings
        self._report = report
        self._jobs: dict[str, _Job] = {}
        self._ready: deque[_Job] = deque()
        self._finished: list[Sample] = []
        self._turns_seen: set[str] = set()
        self._num_jobs = 0
        self._num_fruitless = 0
        self._stop = stop

    def run(self) -> None:
        """Runs until the dataset has the wanted tokens. After an interruption, continues after the last answer on disk.

        Raises:
            StoppedError: ``stop`` returned True; all finished answers are on disk.
            ConfigError: none of the target's answers are usable.
            InternalError: the engine failed.
        """
        fresh = self._fresh_jobs()
        try:
            while self._num_tokens() < self._settings.num_tokens:
                check(self._stop)
                while len(self._jobs) < self._settings.batch_size:
                    self._start(self._ready.popleft() if self._ready else next(fresh))
                for output in self._engine.step():
                    self._take(output)
                if len(self._finished) >= _SHARD_SAMPLES:
                    self._write()
        finally:
            self._write()

    def _num_tokens(self) -> int:
        return self._dataset.num_answer_tokens + sum(sample.num_answer_tokens for sample in self._finished)

    def _write(self) -> None:
        self._dataset.append(self._finished)
        self._finished = []

    def _fresh_jobs(self) -> Iterator[_Job]:
        """Yields turns from the files and turns to be sampled, in the configured share."""
        progress, share = self._dataset.progress, self._settings.self_prompt_share
        before_user = self._chat.before_user
        own_part = 0.0
        while True:
            own_part += share if self._prompts else 1.0
            if own_part >= 1.0 and before_user is not None:
                own_part -= 1.0
                index = progress.get("sampled_turns", 0)
                progress["sampled_turns"] = index + 1
                params = SamplingParams(
                    max_tokens=self._settings.max_turn_tokens,
                    temperature=_TURN_TEMPERATURE,
                    top_k=_TURN_TOP_K,
                    seed=self._settings.seed + 2 * index,
                )
                yield _Job(before_user, params, is_turn=True)
                continue
            index = progress.get("file_prompts", 0)
            progress["file_prompts"] = index + 1
            yield self._answer_job(self._prompts[index % len(self._prompts)], index)

    def _answer_job(self, turns: Turns, index: int) -> _Job:
        settings = self._settings
        rounds = index // max(1, len(self._prompts))
        params = SamplingParams(
            max_tokens=settings.max_answer_tokens,
            temperature=settings.temperatures[(index + rounds) % len(settings.temperatures)],
            seed=settings.seed + 2 * index + 1,
        )
        return _Job(self._chat.prompt(turns[0]), params, is_turn=False, turns=turns[:1], further=turns[1:])

    def _next_job(self, job: _Job) -> _Job:
        """The job of the user's next turn after the answer of ``job``."""
        answer = self._chat.tokenizer.decode(job.token_ids).strip()
        turns = (*job.turns, answer, job.further[0])
        return _Job(self._chat.prompt(*turns), job.params, is_turn=False, turns=turns, further=job.further[1:])

    def _start(self, job: _Job) -> None:
        if len(job.prompt_token_ids) > self._settings.max_prompt_tokens:
            self._count_fruitless()
            return
        request_id = str(self._num_jobs)
        self._num_jobs += 1
        self._jobs[request_id] = job
        self._engine.scheduler.add(
            Request(request_id, list(job.prompt_token_ids), job.params, self._eos_token_ids, arrival_s=self._num_jobs)
        )

    def _take(self, output: TokenOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            raise InternalError(f"training data: the target failed while it answered: {output.error}")
        job = self._jobs[output.request_id]
        job.token_ids.extend(output.token_ids)
        if output.finish_reason is not None:
            self._finish(self._jobs.pop(output.request_id), output.finish_reason)

    def _finish(self, job: _Job, reason: FinishReason) -> None:
        if job.is_turn:
            turn = self._chat.tokenizer.decode(job.token_ids).strip()
            if reason is FinishReason.STOP and is_usable_turn(turn) and turn not in self._turns_seen:
                self._turns_seen.add(turn)
                self._ready.append(self._answer_job((turn,), len(self._turns_seen)))
            else:
                self._count_fruitless()
        elif len(job.token_ids) >= _MIN_ANSWER_TOKENS:
            self._num_fruitless = 0
            self._finished.append(Sample((*job.prompt_token_ids, *job.token_ids), len(job.prompt_token_ids)))
            self._report(self._num_tokens())
            if job.further:
                self._ready.append(self._next_job(job))
        else:
            self._count_fruitless()

    def _count_fruitless(self) -> None:
        self._num_fruitless += 1
        if self._num_fruitless >= _MAX_FRUITLESS_JOBS:
            raise ConfigError(
                f"training data: {_MAX_FRUITLESS_JOBS} attempts in a row gave no usable answer: prompts had more "
                f"than {self._settings.max_prompt_tokens} tokens, answers fewer than {_MIN_ANSWER_TOKENS}, or the "
                "target wrote implausible user turns. Give other prompts, or a model that answers them."
            )
