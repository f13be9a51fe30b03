"""Offline inference with the engine alone: no cluster, no server, no drafts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ConfigError, InternalError, InvalidRequestError
from baton.core.kv_spec import KVEncoding
from baton.core.memory_budget import MIN_BLOCKS, divide_memory
from baton.core.progress import progress_on_stderr
from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request import FinishReason, Request, SamplingParams, TokenLogprobs, is_integer, is_number
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.default_model import DEFAULT_MODEL_NAME
from baton.engine.models.model_config import check_context_length
from baton.engine.models.model_loader import LoadedModel, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.device_memory import SMALL_CACHE_BLOCKS, CudaMemory, StepLimits, measure_use
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import KV_CACHES, WEIGHTS, RunnerOptions
from baton.engine.runner.served_model import load_served_model
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step.overlap import always, never
from baton.grammar.compiler import GrammarCompiler
from baton.process.cores import usable_cores

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_BLOCK_SIZE = 16
_CPU_KV_BYTES = 2**30
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        prompt_token_ids: token ids of the prompt.
        text: text of the answer, without special tokens.
        token_ids: token ids of the answer; the last one may be the token that ended it.
        finish_reason: ``stop`` where the model or one of ``stop_token_ids`` ended the answer, ``length`` at
            ``max_tokens``.
        logprobs: one entry per token of the answer; ``None`` unless ``SamplingParams.logprobs`` asks for them.
        num_cached_tokens: prompt tokens whose KV was in the cache already.
        prompt_logprobs: those of the prompt's tokens after the first; ``None`` unless
            ``SamplingParams.prompt_logprobs`` asks for them.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None


class LLM:
    """A model in this process. Calls from several threads wait for one another.

    The first model on a CPU compiles the decoder, once on a machine, and shows its progress on standard error.

    Args:
        model: the bundled model, an id on a hub, a folder, or a GGUF file.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (a GPU where there is one), ``cpu`` or ``cuda``.
        weights: ``native``, ``dequantized`` (for a quantized checkpoint), ``int8`` or ``int4`` (on a CPU), or ``fp8``
            (on a GPU).
        kv_cache: ``native`` or ``int8``.
        max_model_len: limit for the tokens of a prompt and its answer; ``None`` takes what both the model and the cache
            hold.
        max_num_seqs: limit for the sequences of one step.
        chunk_tokens: limit for the tokens of one step.
        kv_blocks: size of the KV cache, in blocks of 16 tokens; ``None`` takes 1 GiB on a CPU, and on a GPU what
            ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of a GPU's memory that may be used, in (0, 1].
        num_threads: CPU threads; ``None`` takes all cores that this process may use.

    Raises:
        ConfigError: an argument is out of its range, or the model does not fit into memory.
        ModelUnavailableError: the model cannot be fetched.
        UnsupportedModelError: the engine cannot compute the model.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL_NAME,
        *,
        dtype: str = "auto",
        device: str = "auto",
        weights: str = "native",
        kv_cache: str = "native",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        chunk_tokens: int = 512,
        kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_threads: int | None = None,
    ) -> None:
        _require(isinstance(model, str) and model != "", "model", "the name, id or path of a model", model)
        _require_one_of("dtype", ("auto", *TORCH_DTYPES), dtype)
        _require_one_of("device", ("auto", "cpu", "cuda"), device)
        _require_one_of("weights", WEIGHTS, weights)
        _require_one_of("kv_cache", KV_CACHES, kv_cache)
        has_device = device != "cuda" or torch.cuda.is_available()
        _require(has_device, "device", "auto or cpu, since no GPU is visible", device)
        _require_integer("max_num_seqs", 1, max_num_seqs)
        _require_integer("chunk_tokens", 1, chunk_tokens)
        for name, least, value in (
            ("max_model_len", 2, max_model_len),
            ("kv_blocks", MIN_BLOCKS, kv_blocks),
            ("num_threads", 1, num_threads),
        ):
            if value is not None:
                _require_integer(name, least, value)
        is_share = is_number(gpu_memory_utilization) and 0 < gpu_memory_utilization <= 1
        _require(is_share, "gpu_memory_utilization", "in (0, 1]", gpu_memory_utilization)
        options = RunnerOptions(weights=weights, kv_cache=kv_cache)
        source, chosen_device = resolve_model(model), pick_device(device)
        if chosen_device.type == "cpu":
            torch.set_num_threads(num_threads or usable_cores())
        max_num_seqs = min(max_num_seqs, chunk_tokens)
        self.tokenizer = Tokenizer.load(source.path)
        with progress_on_stderr():
            loaded = load_served_model(source, dtype, chosen_device, weights)
            if max_model_len is not None:
                check_context_length(max_model_len, loaded.max_model_len)
            if kv_blocks is None:
                longest = max_model_len or loaded.max_model_len
                limits = StepLimits(chunk_tokens, max_num_seqs, 0, longest, records_graphs=chosen_device.type == "cuda")
                kv_blocks = _num_blocks(loaded, options, limits, gpu_memory_utilization)
            try:
                self._runner = ModelRunner(loaded, kv_blocks, _BLOCK_SIZE, options)
            except (MemoryError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                    raise
                raise ConfigError(f"There is no memory for kv_blocks: {kv_blocks} ({error}). Give fewer.") from error
        capacity = kv_blocks * _BLOCK_SIZE
        self.max_model_len = max_model_len or min(loaded.max_model_len, capacity)
        _require(
            self.max_model_len <= capacity,
            "max_model_len",
            f"at most {capacity}, the capacity of the KV cache",
            max_model_len,
        )
        self._runner.capture_graphs(max_num_seqs, 0, self.max_model_len)
        runs_ahead = always if chosen_device.type == "cuda" and not self._runner.forward_waits else never
        scheduler = Scheduler(
            SchedulerLimits(chunk_tokens, max_num_seqs, self.max_model_len), BlockManager(kv_blocks, _BLOCK_SIZE)
        )
        self._engine = Engine(self._runner, scheduler, runs_ahead=runs_ahead)
        self._grammars = GrammarCompiler(self.tokenizer.to_json, loaded.vocab_size, loaded.eos_token_ids)
        self._num_requests = 0
        self._lock = Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the threads and graphs of the model, which cannot answer anything afterwards."""
        with self._lock:
            self._is_closed = True
            self._runner.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, as many at once as fit.

        Args:
            prompts: texts or lists of token ids; a single one is a batch of one.
            sampling_params: one for all prompts, or one for each; ``None`` takes the defaults. The random numbers of an
                answer depend on ``seed`` and the token's position only, so that equal requests get equal answers.

        Returns:
            One answer per prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid, or :meth:`close` was called before; no prompt
                is computed then.
            InternalError: the engine failed on a request.
        """
        batch: Any = [prompts] if _is_one(prompts) else prompts
        if not isinstance(batch, Iterable) or isinstance(batch, (bytes, Mapping)):
            raise _not_prompts(batch)
        return self._answer([self._encode(prompt) for prompt in batch], sampling_params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for conversations, through the model's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order, or several such conversations.
        """
        is_one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        if not _is_list_of(_is_conversation, conversations):
            raise InvalidRequestError(
                'messages must be a list of {"role": ..., "content": ...}, or a list of such lists, '
                f"got {_short(messages)}.",
                param="messages",
            )
        return self._answer([self.tokenizer.apply_chat_template(each) for each in conversations], sampling_params)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise _not_prompts(prompt)
        token_ids = list(prompt)
        if not all(map(is_integer, token_ids)):
            raise _not_prompts(prompt)
        return [int(token_id) for token_id in token_ids]

    def _answer(
        self, prompts: list[list[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        elif _is_list_of(_is_params, sampling_params):
            params = list(sampling_params)
        else:
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {_short(sampling_params)}.",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"There are {len(prompts)} prompts but {len(params)} sampling_params; give one for all "
                "prompts, or one for each.",
                param="sampling_params",
            )
        with self._lock:
            if self._is_closed:
                raise InvalidRequestError("This LLM is closed. Make another one, or generate before close().")
            answers = [self._new_answer(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
            for answer in answers:
                self._engine.check_request(answer.request)
            try:
                self._run(answers)
            finally:
                for answer in answers:
                    self._engine.finish(answer.request.request_id, FinishReason.ABORT)
            return [self._output(answer) for answer in answers]

    def _new_answer(self, prompt: list[int], params: SamplingParams) -> _Answer:
        self._num_requests += 1
        request = Request(str(self._num_requests), prompt, params, self._runner.loaded.eos_token_ids)
        if params.grammar:
            request.grammar = self._grammars.compile(params.grammar)
        return _Answer(request)

    def _run(self, answers: Sequence[_Answer]) -> None:
        by_id = {answer.request.request_id: answer for answer in answers}
        for answer in answers:
            self._engine.scheduler.add(answer.request)
        num_open = len(answers)
        while num_open:
            for output in self._engine.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise output.error or InternalError("the engine failed on this request")
                answer = by_id[output.request_id]
                answer.logprobs.extend(output.logprobs or ())
                if output.prompt_logprobs is not None:
                    answer.prompt_logprobs = output.prompt_logprobs
                answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
                num_open -= output.finish_reason is not None

    def _output(self, answer: _Answer) -> RequestOutput:
        request = answer.request
        detokenizer = self.tokenizer.detokenizer(prompt_token_ids=request.prompt_token_ids)
        text = detokenizer.push(request.output_token_ids) + detokenizer.flush()
        if request.finish_reason is None:
            raise RuntimeError(f"request {request.request_id} has not ended")
        return RequestOutput(
            tuple(request.prompt_token_ids),
            text,
            tuple(request.output_token_ids),
            request.finish_reason,
            None if request.params.logprobs is None else tuple(answer.logprobs),
            answer.num_cached_tokens,
            answer.prompt_logprobs,
        )


@dataclass(slots=True)
class _Answer:
    request: Request
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


def _num_blocks(loaded: LoadedModel, options: RunnerOptions, limits: StepLimits, utilization: float) -> int:
    """Number of blocks that fit into the device's memory beside the weights and the largest step.

    Raises:
        ConfigError: no KV cache fits.
    """
    spec = loaded.kv_spec(_BLOCK_SIZE, options.weights, KVEncoding(options.kv_cache))
    block_bytes = spec.bytes_per_token * _BLOCK_SIZE
    device = loaded.model.device
    if device.type != "cuda":
        return max(MIN_BLOCKS, _CPU_KV_BYTES // block_bytes)
    memory = CudaMemory(device)
    runner = ModelRunner(loaded, SMALL_CACHE_BLOCKS, _BLOCK_SIZE, replace(options, cuda_graphs="off"))
    try:
        use = measure_use(runner, limits, memory)
    finally:
        runner.close()
        memory.release()
    return divide_memory(use, utilization, 1.0, block_bytes).kv_blocks


def _is_one(prompts: object) -> bool:
    """Whether it is a text, or token ids in a list or an array of numpy."""
    return isinstance(prompts, str) or (
        isinstance(prompts, (Sequence, np.ndarray)) and len(prompts) > 0 and is_integer(prompts[0])
    )


def _is_conversation(value: object) -> bool:
    return _is_list_of(lambda message: isinstance(message, Mapping), value)


def _is_params(value: object) -> bool:
    return isinstance(value, SamplingParams)


def _is_list_of(is_right: Callable[[object], bool], values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and all(map(is_right, values))


def _not_prompts(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompts must be a text, a list of token ids, or a list of these, got {_short(value)}.", param="prompts"
    )


def _short(value: object) -> str:
    return f"{type(value).__name__} {repr(value)[:_MAX_SHOWN]}"


def _require_integer(name: str, least: int, value: object) -> None:
    _require(is_integer(value) and value >= least, name, f"an integer of at least {least}", value)


def _require_one_of(name: str, known: Sequence[str], value: object) -> None:
    _require(isinstance(value, str) and value in known, name, f"one of {', '.join(known)}", value)


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {expected}, got {value!r}.")
