"""The options of ``baton bench serve``, ``sweep`` and ``compare``. The load tool is imported when a command runs, since
its libraries come with the extra ``bench``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.core.errors import ConfigError
from baton.core.option_text import integers, numbers
from cluster.cli.cli_reporter import error_console, print_report

_COMPARE = "baton.bench.compare:run_compare"
_EXTRA_LIBRARIES = ("aiohttp", "scipy")
_API_KEY_VARIABLE = "BATON_BENCH_API_KEY"

Url = Annotated[
    str | None,
    typer.Option(help="Base URL, such as http://127.0.0.1:8000/v1. Default: the cluster that `baton up` runs here."),
]
Model = Annotated[str | None, typer.Option(help="Served model. Default: the first of /v1/models.")]
Chat = Annotated[bool, typer.Option("--chat/--completion", help="Through the chat template, or as it is.")]
ApiKey = Annotated[str | None, typer.Option(envvar=_API_KEY_VARIABLE, help="Sent as a bearer token.", show_envvar=True)]
Tokenizer = Annotated[
    str | None, typer.Option(help="Name, hub id or folder of the model whose tokenizer makes prompts. Default: found.")
]
Temperature = Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")]
ExactLengths = Annotated[
    bool, typer.Option("--exact-lengths/--free-lengths", help="Ask for ignore_eos and min_tokens, or let answers end.")
]
ServiceTier = Annotated[
    str | None,
    typer.Option(metavar="CLASS", help="SLO class of every request, or another service_tier of the server's."),
]
ExtraBody = Annotated[str, typer.Option(metavar="JSON", help="Laid over the body of every request.")]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for each request.")]
Input = Annotated[
    str,
    typer.Option(
        help="Tokens of a prompt: 512, uniform:100-400, lognormal:median=200,p95=800 or lognormal:mean=300,sigma=0.9."
    ),
]
Output = Annotated[str, typer.Option(help="Tokens of an answer, in the same way.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help='JSONL of {"prompt": ...}, instead of --input.')]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Mooncake JSONL or Azure CSV, instead of --input and --output.")
]
TraceFormat = Annotated[str, typer.Option(help="auto, mooncake or azure.")]
TraceStart = Annotated[float, typer.Option("--trace-start", min=0, help="Seconds of the trace to leave out.")]
TraceSeconds = Annotated[float | None, typer.Option(help="How much of the trace is used. Default: all.")]
InputScale = Annotated[str, typer.Option(help="Factor of prompt lengths; auto: the longest of the trace just fits.")]
OutputScale = Annotated[float, typer.Option(help="Factor of answer lengths.")]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Longest prompt, in tokens.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Context = Annotated[int | None, typer.Option(min=2, help="Most tokens of prompt and answer together.")]
Seed = Annotated[int, typer.Option(min=0, help="Of lengths and arrivals; the same seed is the same load.")]
Salt = Annotated[str | None, typer.Option(help="Of the prompts' text. Default: another in every run, for the caches.")]
Burstiness = Annotated[float, typer.Option(help="Of --arrival bursty: 1 is Poisson, less is burstier.")]
MaxInflight = Annotated[
    int | None, typer.Option(help="Of an open loop: more wait in the client, and their wait counts.")
]
Requests = Annotated[int | None, typer.Option(help="Most of a stage. Default: 1000, or the whole trace.")]
DurationS = Annotated[
    float | None,
    typer.Option("--duration", help="Most seconds of a stage behind its warm-up. Default: 60; 3600 for a replay."),
]
WarmupRequests = Annotated[
    int | None, typer.Option(help="Sent first, left out. Default: one per client; none in an open loop.")
]
WarmupS = Annotated[float, typer.Option("--warmup", help="Seconds of each stage that are left out.")]
GraceS = Annotated[float, typer.Option("--grace", help="Seconds to wait for answers at the end of a stage.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Everything, with all settings.")]


def _shared(
    url: Url = None,
    model: Model = None,
    chat: Chat = False,
    api_key: ApiKey = None,
    tokenizer: Tokenizer = None,
    temperature: Temperature = 0.0,
    exact_lengths: ExactLengths = True,
    service_tier: ServiceTier = None,
    extra_body: ExtraBody = "",
    timeout_s: TimeoutS = 600.0,
    input: Input = "lognormal:median=200,p95=800",
    output: Output = "lognormal:median=64,p95=200",
    prompts: Prompts = None,
    trace: Trace = None,
    trace_format: TraceFormat = "auto",
    trace_start_s: TraceStart = 0.0,
    trace_seconds: TraceSeconds = None,
    input_scale: InputScale = "1",
    output_scale: OutputScale = 1.0,
    max_input: MaxInput = None,
    max_output: MaxOutput = None,
    context: Context = None,
    seed: Seed = 0,
    salt: Salt = None,
    burstiness: Burstiness = 1.0,
    max_inflight: MaxInflight = None,
    warmup_s: WarmupS = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Declares the options that ``serve`` and ``sweep`` share."""


def _serve(
    concurrency: Annotated[
        str, typer.Option(help="Closed loops, one after another: requests at once, such as 1,4,16.")
    ] = "",
    rate: Annotated[str, typer.Option(help="Open loops, one after another: requests per second, such as 1,2,4.")] = "",
    arrival: Annotated[
        str | None, typer.Option(help="Of open loops: poisson (default), bursty, constant or trace.")
    ] = None,
    speed_up: Annotated[float, typer.Option(help="Of the clock of --arrival trace.")] = 1.0,
    requests: Requests = None,
    duration_s: DurationS = None,
    warmup_requests: WarmupRequests = None,
    grace_s: GraceS = 60.0,
    slo: Annotated[str | None, typer.Option(help="For goodput, such as ttft=500ms,tpot=50ms (also e2e).")] = None,
    with_samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Write every request into the JSON, too.")
    ] = False,
) -> None:
    """Put load on any OpenAI-compatible endpoint: TTFT, TPOT, ITL, E2E, throughput and goodput.

    One request at a time, unless --concurrency or --rate or --arrival say otherwise. Ctrl-C ends it and shows what
    there is.
    """


def _sweep(
    slo: Annotated[str, typer.Option(help="What a request must keep, such as ttft=500ms,tpot=50ms (also e2e).")],
    arrival: Annotated[str | None, typer.Option(help="poisson (default), bursty or constant.")] = None,
    requests: Annotated[int | None, typer.Option(help="Most of a probe.")] = 200,
    duration_s: Annotated[
        float | None, typer.Option("--duration", help="Most seconds of a probe behind its warm-up.")
    ] = 60.0,
    warmup_requests: Annotated[int | None, typer.Option(help="Of each probe, sent first and left out.")] = 5,
    grace_s: GraceS = 30.0,
    percentile: Annotated[float, typer.Option(help="So many percent of the requests must keep the SLO.")] = 90.0,
    start_rate: Annotated[float, typer.Option(help="Probed first, in requests per second.")] = 1.0,
    min_rate: Annotated[float, typer.Option(help="Lowest rate to probe.")] = 0.05,
    max_rate: Annotated[float, typer.Option(help="Highest rate to probe.")] = 1000.0,
    precision: Annotated[float, typer.Option(help="Ends when the answer is known to this share.")] = 0.05,
    max_rates: Annotated[int, typer.Option(help="Most rates to probe.")] = 16,
    max_repeats: Annotated[int, typer.Option("--repeats", help="Most probes of a rate that is a near thing.")] = 3,
) -> None:
    """Find the goodput: the highest request rate at which a percentile of the requests keeps TTFT and TPOT targets."""


def _load_command(benchmark: str, own: Callable[..., None]) -> Callable[..., None]:
    """Creates a function to register with typer, whose options are the shared ones and the parameters of ``own``."""
    declared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for declaration in (_shared, own)
        for parameter in inspect.signature(declaration, eval_str=True).parameters.values()
    ]

    def command(**options: Any) -> None:
        for name, parse in (("concurrency", integers), ("rate", numbers)):
            if name in options:
                options[name] = parse(f"--{name}", options[name])
        shown, status = load_benchmark(benchmark)(options, error_console())
        print_report(shown)
        if status:
            raise typer.Exit(status)

    command.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
    command.__doc__ = own.__doc__
    return command


bench_serve = _load_command("baton.bench.command:serve", _serve)
bench_sweep = _load_command("baton.bench.sweep:sweep", _sweep)


def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A report of `baton bench serve --json`.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Ratios nearer to 1 than this are called the same.")
    ] = 0.03,
) -> None:
    """Show what is better and what is worse in B, and what was measured differently."""
    print_report(load_benchmark(_COMPARE)(first, second, tolerance)[0])


def load_benchmark(path: str) -> Callable[..., Any]:
    """Imports the function ``module:name``.

    Raises:
        ConfigError: a library of the extra ``bench`` is not installed.
    """
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_LIBRARIES:
            raise
        raise ConfigError(
            f"{error.name} is missing. Install it with: pip install -e '.[bench]' (in baton's folder)"
        ) from error
    function: Callable[..., Any] = getattr(module, function_name)
    return function
