"""``baton train``: loads the target, collects its answers, trains a draft on them, and reports its acceptance."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType

from baton.core.errors import ConfigError
from baton.engine.draft.references import AUTO, default_draft
from baton.engine.models.default_model import DEFAULT_MODEL_NAME, is_default_model
from baton.engine.models.model_cache import cache_dir
from baton.engine.models.model_loader import LoadedModel, load_model, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.train.alone import alone_in
from baton.train.card import CardFacts
from baton.train.collect import Collector, CollectSettings
from baton.train.dataset import AnswerDataset
from baton.train.display import Display, summary
from baton.train.draft_model import DraftModelMethod
from baton.train.eagle3 import Eagle3Method
from baton.train.medusa import MedusaMethod
from baton.train.options import Eagle3Options, MedusaOptions, TrainOptions
from baton.train.output_folder import check_output
from baton.train.prompt_templates import PromptTemplates
from baton.train.prompts import ChatFormat, PlainFormat, PromptFormat, Turns, read_prompts
from baton.train.run import Method, train
from baton.train.settings import DraftModelSettings, Eagle3Settings, MedusaSettings
from baton.train.stopping import Stop, StoppedError
from baton.train.target_engine import answering_engine

_MAX_PROMPT_TOKENS = 512
_MAX_TURN_TOKENS = 300
_DEFAULT_MODEL_CARD_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_MODEL_LICENSE = "apache-2.0"
_UNKNOWN_LICENSE = "unknown"


def run(
    kind: str, options: TrainOptions, command: str, stop: Stop, on_ready: Callable[[], None], console: Console
) -> RenderableType:
    """Collects, trains and evaluates; continues where an earlier run with the same options was interrupted.

    Args:
        kind: one of :data:`baton.train.options.KINDS`.
        options: options of this kind.
        command: the command line that repeats the run, for the model card.
        stop: checked regularly.
        on_ready: called once the target is loaded; from then on ``stop`` is checked at least every few seconds.
        console: shows the progress.

    Returns:
        The summary to show at the end.

    Raises:
        BatonError: an option, a file or the model cannot be used; the message says why.
        StoppedError: ``stop`` returned True; the message says how to continue.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU on this machine. Use auto or cpu.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with Display(console) as display:
        try:
            return _run(kind, options, command, stop, on_ready, display)
        except StoppedError as error:
            raise StoppedError(
                f"stopped. The progress is on disk; the same command resumes the training: {command}"
            ) from error


def _run(
    kind: str, options: TrainOptions, command: str, stop: Stop, on_ready: Callable[[], None], display: Display
) -> RenderableType:
    make_method = _prepare(options)
    prompts = _all_prompts(options)
    if options.out is not None:  # checked before a model is fetched
        check_output(options.out, kind)
    source = resolve_model(options.model, display.say)
    output = options.out
    if output is None:
        output = Path("out") / f"{Path(source.name).name}-{kind}"
        check_output(output, kind)
    display.say(f"loading {source.name}")
    target = load_model(source, options.dtype, pick_device(options.device))
    tokenizer = Tokenizer.load(source.path)
    on_ready()
    method = make_method(target, tokenizer)
    work = options.work or cache_dir() / "train" / f"{Path(source.name).name}-{target.fingerprint[:8]}"
    with alone_in(work):
        dataset = _collect(options, target, tokenizer, prompts, work / "answers", stop, display)
        name = _DEFAULT_MODEL_CARD_NAME if is_default_model(options.model) else source.name
        facts = CardFacts(
            target_name=name,
            license=options.license
            or (_DEFAULT_MODEL_LICENSE if is_default_model(options.model) else _UNKNOWN_LICENSE),
            data=_describe(dataset, options),
            command=_for_others(command, options),
        )
        result = train(
            method, target, [dataset], output, work / kind, facts, display.progressed,
            stop=stop, cache_states=options.cache_states,
        )  # fmt: skip
    return summary(result)


def _for_others(command: str, options: TrainOptions) -> str:
    """The command for the draft's card: files and folders go by their names, since others have theirs elsewhere."""
    for path in (*(options.prompts or ()), options.work, options.out):
        if path is not None and path.is_absolute():
            command = command.replace(str(path), path.name)
    return command


def _all_prompts(options: TrainOptions) -> list[Turns]:
    """The prompts of the files and those from templates, mixed if there are both."""
    prompts = read_prompts(options.prompts or [])
    if options.template_prompts:
        prompts += PromptTemplates.load().prompts(options.template_prompts, options.seed)
        random.Random(options.seed).shuffle(prompts)
    return prompts


def _prepare(options: TrainOptions) -> Callable[[LoadedModel, Tokenizer], Method]:
    """Reads the settings of the kind before anything that takes time, and returns a factory of the method."""
    if isinstance(options, Eagle3Options):
        eagle3 = Eagle3Settings(**_checked_start(options.settings))
        return lambda target, tokenizer: Eagle3Method(eagle3, target)
    if isinstance(options, MedusaOptions):
        medusa = MedusaSettings(**options.settings)
        return lambda target, tokenizer: MedusaMethod(medusa, target)
    draft = DraftModelSettings(**options.settings)
    return lambda target, tokenizer: DraftModelMethod(draft, target, tokenizer)


def _checked_start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Checks and resolves ``start_from``, whose head determines the shape. ``auto`` is the head included in baton."""
    reference = settings.get("start_from")
    if reference is None:
        return dict(settings)
    if "num_kv_heads" in settings:
        raise ConfigError("--kv-heads cannot be chosen with --from, because the existing head determines its shape.")
    return {**settings, "start_from": str(default_draft(DEFAULT_MODEL_NAME)) if reference == AUTO else reference}


def _collect(
    options: TrainOptions,
    target: LoadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Turns],
    folder: Path,
    stop: Stop,
    display: Display,
) -> AnswerDataset:
    chat = _format_of(options, tokenizer, bool(prompts), display)
    settings = _collect_settings(options, target, chat, bool(prompts))
    dataset = AnswerDataset(folder, _what_answers_depend_on(settings, target, prompts))
    if dataset.num_answer_tokens < options.tokens:
        display.collected(dataset.num_answer_tokens, options.tokens)
        with answering_engine(target, settings) as engine:
            Collector(
                engine, chat, target.eos_token_ids, prompts, dataset, settings,
                lambda num_tokens: display.collected(num_tokens, options.tokens), stop,
            ).run()  # fmt: skip
    display.say(f"{len(dataset):,} answers, {dataset.num_answer_tokens:,} tokens in {folder}")
    return dataset


def _format_of(options: TrainOptions, tokenizer: Tokenizer, has_prompts: bool, display: Display) -> PromptFormat:
    if tokenizer.has_chat_template:
        return ChatFormat.of(tokenizer)
    if not has_prompts:
        raise ConfigError(
            f"--prompts: {options.model} has no chat template, so it cannot write user turns of its own. "
            'Give at least one file of {"prompt": "…"} lines.'
        )
    if options.self_prompts:
        raise ConfigError(
            f"--self-prompts is {options.self_prompts}, but {options.model} has no chat template, so it cannot write "
            "user turns of its own. Leave the option out."
        )
    display.say(f"{options.model} has no chat template: prompts are used as plain text")
    return PlainFormat(tokenizer)


def _collect_settings(
    options: TrainOptions, target: LoadedModel, chat: PromptFormat, has_prompts: bool
) -> CollectSettings:
    room = target.max_model_len - options.max_answer_tokens
    if room < 1:
        raise ConfigError(
            f"--max-answer-tokens is {options.max_answer_tokens}, but the context of {options.model} has only "
            f"{target.max_model_len} tokens. Lower it to leave tokens for prompts."
        )
    if options.self_prompts == 0 and not has_prompts:
        raise ConfigError(
            "--self-prompts is 0 and there are no --prompts, so there is nothing to answer. Raise "
            "--self-prompts, or give --prompts."
        )
    if chat.before_user is None:
        own_share = 0.0
    elif not has_prompts:
        own_share = 1.0
    else:
        own_share = 0.5 if options.self_prompts is None else options.self_prompts
    return CollectSettings(
        num_tokens=options.tokens,
        max_answer_tokens=options.max_answer_tokens,
        max_prompt_tokens=min(_MAX_PROMPT_TOKENS, room),
        max_turn_tokens=max(1, min(_MAX_TURN_TOKENS, target.max_model_len - len(chat.before_user or ()))),
        temperatures=options.answer_temperatures,
        self_prompt_share=own_share,
        batch_size=options.batch,
        seed=options.seed,
    )


def _what_answers_depend_on(
    settings: CollectSettings, target: LoadedModel, prompts: Sequence[Turns]
) -> Mapping[str, Any]:
    digest = hashlib.blake2b("\0".join("\1".join(turns) for turns in prompts).encode(), digest_size=8).hexdigest()
    return {
        "target": target.fingerprint,
        "temperatures": settings.temperatures,
        "max_answer_tokens": settings.max_answer_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "self_prompts": settings.self_prompt_share,
        "seed": settings.seed,
        "prompts": digest,
    }


def _describe(dataset: AnswerDataset, options: TrainOptions) -> str:
    settings = dataset.settings
    temperatures = " and ".join(f"{temperature:g}" for temperature in settings["temperatures"])
    files = options.prompts
    sources = [f"from {', '.join(path.name for path in files)}"] if files else []
    if options.template_prompts:
        sources.append("made from baton's templates")
    if settings["self_prompts"]:
        sources.append("that the target wrote itself")
    return (
        f"{len(dataset):,} answers of the target itself ({dataset.num_answer_tokens:,} tokens, at most "
        f"{settings['max_answer_tokens']} each), at temperature {temperatures}, to prompts "
        f"{' and '.join(sources)}."
    )
