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
    typer.Option(
        help="Base URL, such as http://127.0.0.1:8000/v1. Default: the cluster that `baton up` runs on this machine."
    ),
]
Model = Annotated[str | None, typer.Option(help="Name of the served model. Default: the first one in /v1/models.")]
Chat = Annotated[
    bool, typer.Option("--chat/--completion", help="Send requests for chat completions or for completions.")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar=_API_KEY_VARIABLE, help="API key, sent as a bearer token.", show_envvar=True)
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Name, hub id or folder of the model whose tokenizer builds the prompts. Default: found automatically."
    ),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 always picks the most likely token.")]
ExactLengths = Annotated[
    bool,
    typer.Option(
        "--exact-lengths/--free-lengths",
        help="Force the length of answers with ignore_eos and min_tokens, or let the model end them.",
    ),
]
ServiceTier = Annotated[
    str | None,
    typer.Option(metavar="CLASS", help="SLO class or service tier of every request."),
]
ExtraBody = Annotated[str, typer.Option(metavar="JSON", help="JSON object merged into the body of every request.")]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.001, help="Timeout of each request, in seconds.")]
Input = Annotated[
    str,
    typer.Option(
        help="Prompt tokens: 512, uniform:100-400, lognormal:median=200,p95=800 or lognormal:mean=300,sigma=0.9."
    ),
]
Output = Annotated[str, typer.Option(help="Output tokens, in the same notation.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help='JSONL file of {"prompt": ...}; replaces --input.')]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Trace in Mooncake JSONL or Azure CSV; replaces --input and --output."),
]
TraceFormat = Annotated[str, typer.Option(help="Format of the trace: auto, mooncake or azure.")]
TraceStart = Annotated[float, typer.Option("--trace-start", min=0, help="Seconds to skip at the start of the trace.")]
TraceSeconds = Annotated[float | None, typer.Option(help="Seconds of the trace to use. Default: all.")]
InputScale = Annotated[
    str, typer.Option(help="Factor of prompt lengths, or auto to make the longest prompt of the trace just fit.")
]
OutputScale = Annotated[float, typer.Option(help="Factor of answer lengths.")]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Maximum number of prompt tokens.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Maximum number of output tokens.")]
Context = Annotated[int | None, typer.Option(min=2, help="Maximum number of prompt and output tokens together.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of lengths and arrival times; the same seed gives the same load.")]
Salt = Annotated[
    str | None, typer.Option(help="Salt of the prompts' text. Default: new in each run, so that caches do not help.")
]
Burstiness = Annotated[float, typer.Option(help="For --arrival bursty: 1 is Poisson, less is burstier.")]
MaxInflight = Annotated[
    int | None,
    typer.Option(help="Limit of requests in flight in an open loop. Others wait in the client, and the wait counts."),
]
Requests = Annotated[
    int | None, typer.Option(help="Maximum number of requests per stage. Default: 1000, or the whole trace.")
]
DurationS = Annotated[
    float | None,
    typer.Option(
        "--duration", help="Maximum length of a stage after its warm-up, in seconds. Default: 60; 3600 for a replay."
    ),
]
WarmupRequests = Annotated[
    int | None,
    typer.Option(help="Number of warm-up requests, not measured. Default: one per client; none in an open loop."),
]
WarmupS = Annotated[float, typer.Option("--warmup", help="Seconds at the start of each stage that are not measured.")]
GraceS = Annotated[float, typer.Option("--grace", help="Longest wait for answers at the end of a stage, in seconds.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results and settings to this file.")
]


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
        str, typer.Option(help="Closed-loop stages: number of concurrent requests, such as 1,4,16.")
    ] = "",
    rate: Annotated[str, typer.Option(help="Open-loop stages: requests per second, such as 1,2,4.")] = "",
    arrival: Annotated[
        str | None, typer.Option(help="Arrivals of open-loop stages: poisson (default), bursty, constant or trace.")
    ] = None,
    speed_up: Annotated[float, typer.Option(help="Replay speed for --arrival trace.")] = 1.0,
    requests: Requests = None,
    duration_s: DurationS = None,
    warmup_requests: WarmupRequests = None,
    grace_s: GraceS = 60.0,
    slo: Annotated[
        str | None, typer.Option(help="Targets for goodput, such as ttft=500ms,tpot=50ms (also e2e).")
    ] = None,
    with_samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Also write every request to the file of --json.")
    ] = False,
) -> None:
    """Measure TTFT, TPOT, ITL, E2E, throughput and goodput of any OpenAI-compatible endpoint under load.

    By default, one request is sent at a time; see --concurrency, --rate and --arrival. Ctrl-C stops the run and shows
    the results so far.
    """


def _sweep(
    slo: Annotated[str, typer.Option(help="Targets of each request, such as ttft=500ms,tpot=50ms (also e2e).")],
    arrival: Annotated[str | None, typer.Option(help="Arrivals: poisson (default), bursty or constant.")] = None,
    requests: Annotated[int | None, typer.Option(help="Maximum number of requests per probe.")] = 200,
    duration_s: Annotated[
        float | None, typer.Option("--duration", help="Maximum length of a probe after its warm-up, in seconds.")
    ] = 60.0,
    warmup_requests: Annotated[
        int | None, typer.Option(help="Number of warm-up requests of each probe, not measured.")
    ] = 5,
    grace_s: GraceS = 30.0,
    percentile: Annotated[float, typer.Option(help="Percentage of requests that must meet the targets.")] = 90.0,
    start_rate: Annotated[float, typer.Option(help="First rate to probe, in requests per second.")] = 1.0,
    min_rate: Annotated[float, typer.Option(help="Lowest rate to probe.")] = 0.05,
    max_rate: Annotated[float, typer.Option(help="Highest rate to probe.")] = 1000.0,
    precision: Annotated[float, typer.Option(help="Relative precision at which the search ends.")] = 0.05,
    max_rates: Annotated[int, typer.Option(help="Maximum number of rates to probe.")] = 16,
    max_repeats: Annotated[
        int, typer.Option("--repeats", help="Maximum number of probes of a rate whose result is close to the targets.")
    ] = 3,
) -> None:
    """Find the goodput: the highest request rate at which a percentage of the requests meets TTFT and TPOT targets."""


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
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The report to compare with it.")],
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Ratios that differ from 1 by less than this count as equal.")
    ] = 0.03,
) -> None:
    """Show what is better and what is worse in B, and which settings differ."""
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
            f"{error.name} is not installed. Install it with `pip install -e '.[bench]'` in baton's folder."
        ) from error
    function: Callable[..., Any] = getattr(module, function_name)
    return function
