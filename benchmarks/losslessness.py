"""Whether sampled answers keep the model's distribution under speculation, on a real model:
``python -m benchmarks.losslessness``.

Many short answers to one prompt at different seeds are counted as triples of tokens: the first comes from the prompt,
the other two from verified drafts. Few tokens may be sampled (top-k), so that the model itself can tell the
probability of every triple. Pearson's test compares the counts with these.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import chi2

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ConfigError, InternalError
from baton.core.request import FinishReason, Request, SamplingParams
from baton.engine.contracts import Verifier
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.sampling.sampler import probabilities
from baton.engine.sampling.verification import sampling_row
from baton.engine.scheduling.scheduler import Scheduler
from baton.process.worker_environment import become_like_a_worker
from benchmarks.options import overrides_of, run_command
from benchmarks.speculation_target import Target, load_target
from cluster.cli.cli_reporter import Reporter
from cluster.config.config import BatonConfig, load_config
from cluster.config.worker_config import AcceptanceRule, SpeculationConfig
from decode_worker.speculation.controller import SpeculationController
from decode_worker.speculation.registry import create_controller
from decode_worker.speculation.verification import create_verifier

T = TypeVar("T", bound=Hashable)

_LENGTH = 3
_TREE_TOKENS = 4
_PROMPT = "Tell me about a city that you like."
_SUSPICIOUS = 1e-3
_REPORTS_OF_A_CASE = 20


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a chi-square test.

    Attributes:
        p_value: the probability of counts that deviate at least this much from the expected ones.
    """

    statistic: float
    degrees_of_freedom: int
    p_value: float


@dataclass(frozen=True, slots=True)
class LosslessnessSettings:
    """The settings of the test.

    Attributes:
        draws: number of answers per case.
        seeds: number of groups of answers, each of which is also tested separately.
        top_k: number of tokens that may be sampled at each position.
        batch: number of concurrent answers.
    """

    draws: int
    seeds: int
    top_k: int = 3
    temperature: float = 1.0
    batch: int = 100


@dataclass(frozen=True, slots=True)
class Case:
    """A method with an acceptance rule, with chains or trees."""

    method: str
    acceptance: AcceptanceRule
    tree_max_batch: int = 0

    @property
    def name(self) -> str:
        shape = "trees" if self.tree_max_batch else "chains"
        return f"{self.method}, {self.acceptance}, {shape}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The test results of a case."""

    case: Case
    together: ChiSquare
    by_seed: tuple[ChiSquare, ...]
    num_drafted: int
    num_accepted: int
    num_failures: int = 0

    @property
    def is_suspicious(self) -> bool:
        if not self.num_drafted or self.num_failures:
            return True
        least = min(self.together.p_value, *(test.p_value * len(self.by_seed) for test in self.by_seed))
        return least < _SUSPICIOUS


def run(config: BatonConfig, report: Callable[[str], None], draws: int, seeds: int) -> tuple[Table, bool]:
    """Tests every case that the configuration's draft allows; returns a table of p-values, and whether all passed.

    In half precision the expected probabilities are inexact by a few percent, since logits depend slightly on the
    number of rows computed at once. So ``dtype: auto`` means float32 here.

    Raises:
        BatonError: there are more seeds than draws, or the model or the draft cannot be loaded.
    """
    if not 1 <= seeds <= draws:
        raise ConfigError(f"--seeds must be from 1 to --draws ({draws}), got {seeds}.")
    settings = LosslessnessSettings(draws, seeds)
    exact = config.model_copy(update={"dtype": "float32"}) if config.dtype == "auto" else config
    report(f"loading {exact.model}")
    bench = _Bench(load_target(exact), settings, report)
    table = Table(title=f"Triples of tokens, {settings.draws} answers per case")
    for heading in ("case", "accepted / drafted", "chi-square", "degrees", "p-value", "p-values by seed"):
        table.add_column(heading)
    is_sound = True
    cases = list(bench.cases())
    for number, case in enumerate(cases, start=1):
        place = f"{number} of {len(cases)}: {case.name}"
        outcome = bench.test(case, place)
        is_sound = is_sound and not outcome.is_suspicious
        report(f"{place}: p = {outcome.together.p_value:.3g}")
        style = "bold red" if outcome.is_suspicious else ""
        table.add_row(
            case.name,
            f"{outcome.num_accepted} / {outcome.num_drafted}",
            f"{outcome.together.statistic:.1f}",
            str(outcome.together.degrees_of_freedom),
            f"{outcome.together.p_value:.3g}",
            " ".join(f"{test.p_value:.3g}" for test in outcome.by_seed),
            style=style,
        )
    return table, is_sound


def chi_square(counts: Mapping[T, int], expected: Mapping[T, float], least_expected: float = 5.0) -> ChiSquare:
    """Pearson's test of goodness of fit.

    Args:
        counts: number of draws by outcome.
        expected: probabilities by outcome, with sum 1. Other outcomes must not occur.
        least_expected: outcomes that are expected less often than this are merged.
    """
    num_draws = sum(counts.values())
    if any(count and not expected.get(outcome, 0.0) > 0 for outcome, count in counts.items()):
        return ChiSquare(float("inf"), len(expected), 0.0)
    cells: list[tuple[float, float]] = []
    rest_count, rest_expected = 0.0, 0.0
    for outcome, probability in expected.items():
        count, mean = float(counts.get(outcome, 0)), probability * num_draws
        if mean >= least_expected:
            cells.append((count, mean))
        else:
            rest_count, rest_expected = rest_count + count, rest_expected + mean
    if rest_expected >= least_expected or not cells:
        cells.append((rest_count, rest_expected))
    elif rest_expected:
        count, mean = cells.pop()
        cells.append((count + rest_count, mean + rest_expected))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    return ChiSquare(statistic, freedom, float(chi2.sf(statistic, freedom)))


def group_sizes(draws: int, seeds: int) -> list[int]:
    """The number of answers for each seed, with sum ``draws``; the first groups have one more if necessary."""
    each, rest = divmod(draws, seeds)
    return [each + (seed < rest) for seed in range(seeds)]


class _Progress:
    """Reports the progress of a case at intervals."""

    def __init__(self, name: str, total: int, report: Callable[[str], None]) -> None:
        self._name = name
        self._total = total
        self._report = report
        self._num_done = 0
        self._show()

    def count(self) -> None:
        """Counts one answer."""
        self._num_done += 1
        reports = self._num_done * _REPORTS_OF_A_CASE // self._total
        if reports != (self._num_done - 1) * _REPORTS_OF_A_CASE // self._total:
            self._show()

    def _show(self) -> None:
        self._report(f"{self._name}: {self._num_done:,} of {self._total:,} answers")


class _Bench:
    """One model, one prompt, and the probabilities of all triples after it."""

    def __init__(self, target: Target, settings: LosslessnessSettings, report: Callable[[str], None]) -> None:
        self._target = target
        self._report = report
        self._settings = settings
        # If the prefix cache holds the prompt in whole blocks, an answer costs only its own tokens.
        self._prompt = _behind_whole_blocks(self._encode(), target.config.engine.block_size)
        self._runner = target.runner(4 + settings.batch * 8)
        report(f"computing the model's own probabilities of {settings.top_k**_LENGTH} answers")
        self._expected = dict(self._extend([((), 1.0)], _LENGTH))

    def cases(self) -> Iterator[Case]:
        """Yields the cases of all methods that draft for a short prompt."""
        yield Case("lookahead", "match")
        draft = self._target.draft
        if draft is not None:
            yield Case(draft.method, "match")
            if draft.method in ("eagle", "eagle3"):
                yield Case(draft.method, "match", tree_max_batch=64)
            if draft.method != "medusa":
                yield Case(draft.method, "residual")

    def test(self, case: Case, place: str = "") -> Outcome:
        """Tests one case.

        Args:
            place: name of the case in reports of progress.
        """
        settings = self._settings
        progress = _Progress(place or case.name, settings.draws, self._report)
        config = SpeculationConfig(
            max_draft_tokens=_LENGTH - 1,
            max_tree_tokens=_TREE_TOKENS,
            tree_max_batch=case.tree_max_batch,
            acceptance=case.acceptance,
        )
        controller = create_controller(config, self._runner, self._target.draft, default=case.method)
        verifier = create_verifier(case.acceptance)
        groups: list[Counter[tuple[int, ...]]] = []
        for seed, count in enumerate(group_sizes(settings.draws, settings.seeds)):
            groups.append(self._draw(verifier, controller, count, seed, progress))
        tests = tuple(chi_square(group, self._expected) for group in groups)
        together: Counter[tuple[int, ...]] = sum(groups, Counter())
        counts = controller.figures.by_method.values()
        return Outcome(
            case,
            chi_square(together, self._expected),
            tests,
            sum(count.num_drafted for count in counts),
            sum(count.num_accepted for count in counts),
            controller.num_failures,
        )

    def _draw(
        self, verifier: Verifier, controller: SpeculationController, count: int, seed: int, progress: _Progress
    ) -> Counter[tuple[int, ...]]:
        blocks = BlockManager(self._runner.cache.num_blocks, self._runner.spec.block_size)
        limits = SchedulerLimits(4096, self._settings.batch, self._target.loaded.max_model_len)
        # Trees need room for more nodes than there are tokens left.
        engine = Engine(self._runner, Scheduler(limits, blocks), verifier, controller, max_draft_tokens=_TREE_TOKENS)
        found: Counter[tuple[int, ...]] = Counter()
        open_requests: dict[str, Request] = {}
        numbers = iter(range(count))
        while True:
            for number in itertools.islice(numbers, self._settings.batch - len(open_requests)):
                params = replace(self._params(), seed=seed * 10_000_000 + number)
                request = Request(str(number), list(self._prompt), params)
                open_requests[request.request_id] = request
                engine.scheduler.add(request)
            if not open_requests:
                return found
            for output in engine.step():
                if output.error is not None:
                    raise InternalError(f"an answer failed: {output.error}")
                request = open_requests[output.request_id]
                if len(request.output_token_ids) >= _LENGTH:
                    found[tuple(open_requests.pop(output.request_id).output_token_ids[:_LENGTH])] += 1
                    progress.count()
                    if output.finish_reason is None:  # the further tokens were requested only as room for drafts
                        engine.finish(request.request_id, FinishReason.ABORT)

    def _params(self) -> SamplingParams:
        settings = self._settings
        # More tokens than are counted, so that there is room for drafts after the last counted one.
        return SamplingParams(
            max_tokens=_LENGTH + 4, temperature=settings.temperature, top_k=settings.top_k, ignore_eos=True
        )

    def _encode(self) -> tuple[int, ...]:
        tokenizer = self._target.tokenizer
        if tokenizer.has_chat_template:
            return tuple(tokenizer.apply_chat_template([{"role": "user", "content": _PROMPT}]))
        return tuple(tokenizer.encode(_PROMPT))

    def _extend(self, paths: list[tuple[tuple[int, ...], float]], depth: int) -> list[tuple[tuple[int, ...], float]]:
        if not depth:
            return paths
        longer = []
        for path, probability in paths:
            for token, share in self._next(path).items():
                longer.append(((*path, token), probability * share))
        return self._extend(longer, depth - 1)

    def _next(self, path: tuple[int, ...]) -> Mapping[int, float]:
        """The probabilities of the next tokens, by the engine's own forward over the whole text."""
        blocks = BlockManager(self._runner.cache.num_blocks, self._runner.spec.block_size, prefix_caching=False)
        scheduler = Scheduler(SchedulerLimits(4096, 1, self._target.loaded.max_model_len), blocks)
        request = Request("probe", list(self._prompt), self._params(), output_token_ids=list(path))
        scheduler.add(request)
        logits = self._runner.forward(self._runner.build_batch(scheduler.schedule()))
        probs = probabilities(logits, [sampling_row(request)])[0]
        tokens = torch.nonzero(probs > 0).flatten().tolist()
        return {token: float(probs[token]) for token in tokens}


def _behind_whole_blocks(prompt: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """The longest end of a prompt that fills whole blocks plus one token, which is always computed."""
    num_blocks = (len(prompt) - 1) // block_size
    return prompt[-(num_blocks * block_size + 1) :]


def command(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML configuration file, as for `baton up`.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the configuration.")
    ] = None,
    draws: Annotated[int, typer.Option(min=100, help="Number of answers per method.")] = 21_000,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of groups of answers, which are also tested separately.")
    ] = 3,
) -> None:
    """Test that sampling keeps the model's distribution under speculation: chi-square over triples of tokens."""
    become_like_a_worker()
    with Reporter() as report:
        shown, is_sound = run(load_config(config, overrides_of(assignments)), report, draws, seeds)
    Console().print(shown)
    if not is_sound:
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.losslessness"))
