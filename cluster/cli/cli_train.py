"""``baton train``: reads options and starts the trainers, which are named by string as roles are.

They load models into this process, as the benchmarks do.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from baton.core.errors import BatonError
from baton.core.option_text import numbers
from baton.engine.models.default_model import DEFAULT_MODEL_NAME
from baton.process.stop_signals import StopSignals
from baton.process.worker_environment import become_like_a_worker
from cluster.cli.cli_reporter import print_report

_RUN = "baton.train.command:run"
_COMMON = (
    "model", "tokens", "max_answer_tokens", "self_prompts", "batch", "work", "out", "epochs", "minutes",
    "learning_rate", "device", "dtype", "threads", "seed", "cache_states", "license",
)  # fmt: skip
"""Options that go to every trainer as they are."""
_STOPPED = "stopped"
_STOPPED_STATUS = 130
"""What shells expect of a command that Ctrl-C ended."""

app = typer.Typer(
    help="Train drafts for speculative decoding. Interrupted, the same command goes on where it was.",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Option(help="The target: its name, a hub id, a folder or a .gguf file.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help='JSONL of {"prompt": ...}; may be repeated. None: the target writes its own.'),
]
Tokens = Annotated[int, typer.Option(help="Answer tokens to collect. More data is worth more than more epochs.")]
MaxAnswerTokens = Annotated[int, typer.Option(help="Of one answer.")]
Temperatures = Annotated[str, typer.Option(help="Of the answers, taken in turn; 0 is greedy.")]
SelfPrompts = Annotated[
    float | None, typer.Option(help="Share of the prompts that the target writes itself. Default: 0.5 with --prompts.")
]
Batch = Annotated[int, typer.Option(help="Conversations at once, while answers are collected.")]
Work = Annotated[
    Path | None,
    typer.Option(help="Folder of answers, hidden states and the run itself. Default: one per target in the cache."),
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the draft. Default: out/MODEL-KIND.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the answers. Default: 5.")]
Minutes = Annotated[
    float | None, typer.Option(help="Budget of the training, behind collecting; it ends with a learning rate of 0.")
]
LearningRate = Annotated[
    float | None, typer.Option(help="The highest one. Default: 5e-4 for eagle3 and draft, 1e-3 for medusa.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="What target and draft compute in: auto, float32 or bfloat16.")]
Threads = Annotated[int | None, typer.Option(help="Of torch on the CPU. Default: every core.")]
Seed = Annotated[int, typer.Option(help="Of answers, first weights and the order of the data.")]
CacheStates = Annotated[
    bool,
    typer.Option(
        "--cache-states/--no-cache-states",
        help="Keep the target's hidden states in the work folder, or compute them in each epoch anew.",
    ),
]
License = Annotated[str | None, typer.Option(help="SPDX identifier for the model card.")]
DraftVocab = Annotated[
    int | None, typer.Option(help="Tokens that the draft can say, the most frequent ones. Default: 8192.")
]


@app.command()
def eagle3(
    context: typer.Context,
    model: Model = DEFAULT_MODEL_NAME,
    prompts: Prompts = None,
    tokens: Tokens = 1_000_000,
    max_answer_tokens: MaxAnswerTokens = 320,
    temperatures: Temperatures = "0,0.8",
    self_prompts: SelfPrompts = None,
    batch: Batch = 32,
    work: Work = None,
    out: Out = None,
    epochs: Epochs = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    cache_states: CacheStates = True,
    license: License = None,
    draft_vocab: DraftVocab = None,
    kv_heads: Annotated[int | None, typer.Option(help="Of the head's attention. Default: the target's.")] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Tokens drafted in a row in training. Default: 4.")] = None,
    start_from: Annotated[
        str | None,
        typer.Option("--from", help="Train this EAGLE-3 head further: a folder, a hub id, or auto for baton's own."),
    ] = None,
) -> None:
    """An EAGLE-3.1 head: one layer on the target's hidden states; the best there is for its size."""
    method = {
        "draft_vocab_size": draft_vocab,
        "num_kv_heads": kv_heads,
        "num_ttt_steps": ttt_steps,
        "start_from": start_from,
    }
    _train("eagle3", context, locals(), method)


@app.command()
def medusa(
    context: typer.Context,
    model: Model = DEFAULT_MODEL_NAME,
    prompts: Prompts = None,
    tokens: Tokens = 1_000_000,
    max_answer_tokens: MaxAnswerTokens = 320,
    temperatures: Temperatures = "0,0.8",
    self_prompts: SelfPrompts = None,
    batch: Batch = 32,
    work: Work = None,
    out: Out = None,
    epochs: Epochs = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    cache_states: CacheStates = True,
    license: License = None,
    draft_vocab: DraftVocab = None,
    heads: Annotated[int | None, typer.Option(help="Tokens that are guessed at once. Default: 4.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Residual blocks of each head. Default: 1.")] = None,
    train_lm_head: Annotated[
        bool, typer.Option(help="Train the lm_head that all heads share, or keep it as the target has it.")
    ] = True,
) -> None:
    """Medusa heads: each guesses one further token from the target's last hidden state. Candidates make a tree."""
    method = {"draft_vocab_size": draft_vocab, "num_heads": heads, "num_blocks": blocks, "train_lm_head": train_lm_head}
    _train("medusa", context, locals(), method)


@app.command()
def draft(
    context: typer.Context,
    model: Model = DEFAULT_MODEL_NAME,
    prompts: Prompts = None,
    tokens: Tokens = 1_000_000,
    max_answer_tokens: MaxAnswerTokens = 320,
    temperatures: Temperatures = "0,0.8",
    self_prompts: SelfPrompts = None,
    batch: Batch = 32,
    work: Work = None,
    out: Out = None,
    epochs: Epochs = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    cache_states: CacheStates = True,
    license: License = None,
    layers: Annotated[int | None, typer.Option(help="Of the draft; a Llama gives its own. Default: 4.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its width. Default: the target's, with its embedding.")] = None,
    heads: Annotated[int | None, typer.Option(help="Of its attention. Default: as wide as the target's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Of its keys and values. Default: as in the target.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of its feed-forward. Default: in proportion.")] = None,
    train_embedding: Annotated[
        bool, typer.Option(help="Train embedding and lm_head too, where they are the target's.")
    ] = False,
) -> None:
    """A small language model of the target's vocabulary, distilled from it."""
    method = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": intermediate,
        "train_embedding": train_embedding,
    }
    _train("draft", context, locals(), method)


def _train(kind: str, context: typer.Context, given: Mapping[str, Any], method: Mapping[str, Any]) -> None:
    """
    Args:
        given: all options of the command by name.
        method: those that only this kind of draft has, by the name of the setting.
    """
    console = Console(stderr=True)
    become_like_a_worker()
    run = _load(_RUN)
    with StopSignals() as signals:
        try:
            shown = run(
                kind, signals.stop.is_set, signals.end_of_start, console,
                command=_command_line(context),
                prompts=tuple(given["prompts"] or ()),
                temperatures=numbers("--temperatures", given["temperatures"]),
                method=method,
                **{name: given[name] for name in _COMMON},
            )  # fmt: skip
        except KeyboardInterrupt:
            raise typer.Exit(_STOPPED_STATUS) from None
        except BatonError as error:
            if error.code != _STOPPED:
                raise
            console.print(Text(error.message), soft_wrap=True)
            raise typer.Exit(_STOPPED_STATUS) from None
    print_report(shown)


def _command_line(context: typer.Context) -> str:
    """The options that were given, in the order in which help lists them."""
    words = ["baton", "train", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append(parameter.opts[-1] if value else parameter.secondary_opts[-1])
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[-1], str(one)]
    return shlex.join(words)


def _load(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    return function
