"""The ``baton`` command. All commands are registered here: as a function under ``@app.command()`` that reads the
options and calls ``cluster/cli/cli_*.py``, or as ``app.command("name")(function)`` where that file reads them itself.
Groups of commands are added by ``app.add_typer``.

ray, torch, transformers and openai are imported only by the commands that need them, so that ``--help`` is fast.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from baton.client.local_cluster import find_endpoint
from cluster.cli.cli_bench import bench_compare, bench_serve, bench_sweep
from cluster.cli.cli_certs import certs
from cluster.cli.cli_check import check
from cluster.cli.cli_common import CaOption, EndpointOption, JsonOption, with_client
from cluster.cli.cli_jobs import app as jobs_app
from cluster.cli.cli_jobs import submit_job
from cluster.cli.cli_node import app as node_app
from cluster.cli.cli_plan import advise, change_role, plan
from cluster.cli.cli_reporter import Reporter, error_console, print_report, run_app
from cluster.cli.cli_trace import app as trace_app
from cluster.cli.cli_train import app as train_app
from cluster.cli.cli_wait_idle import wait_idle
from cluster.cli.settings_command import settings_command
from cluster.simulation.options import SimulateOptions

ConfigOption = Annotated[
    Path | None, typer.Option("-c", "--config", help="YAML configuration file, such as deploy/local.yaml.")
]
AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, such as prefill.workers=2."),
]


def _simulate(_: typer.Context, options: SimulateOptions) -> None:
    from cluster.simulation.entry import fit_profile, simulate

    if options.fit is not None:
        sys.stdout.write(fit_profile(options, options.fit))
        return
    errors = error_console()
    shown = simulate(options, lambda line: errors.print(line, markup=False))
    print_report(shown)


app = typer.Typer(
    help="Serve language models with prefill and decode on separate worker pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Manage the models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
bench_app = typer.Typer(help="Measure an OpenAI-compatible endpoint under load.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
bench_app.command("serve")(bench_serve)
bench_app.command("compare")(bench_compare)
bench_app.command("sweep")(bench_sweep)
app.command("simulate")(settings_command(SimulateOptions, _simulate))
app.command("check")(check)
app.command("certs")(certs)
app.command("plan")(plan)
app.command("advise")(advise)
app.command("move")(change_role)
app.command("wait-idle")(wait_idle)
app.add_typer(trace_app, name="trace")
app.add_typer(train_app, name="train")
app.add_typer(node_app, name="node")
app.add_typer(jobs_app, name="jobs")


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status. User errors are shown as one message without a traceback."""
    return run_app(app, arguments, "baton")


@app.command()
def up(
    config: ConfigOption = None,
    assignments: AssignmentsOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run the cluster in the background.")] = False,
) -> None:
    """Start a cluster and print its endpoint. Ctrl-C shuts it down."""
    from cluster.cli.cli_up import check_configuration, run_detached, run_in_foreground
    from cluster.cli.run_record import ConfigSource

    source = ConfigSource(None if config is None else str(config), tuple(assignments or ()))
    settings = source.read()
    check_configuration(settings)
    if not detach:
        with Reporter() as report:
            run_in_foreground(settings, report, lambda endpoint: _print_ready(report, endpoint, "Ctrl-C"), source)
        return
    arguments = [] if config is None else ["--config", str(config)]
    for text in source.assignments:
        arguments += ["--set", text]
    with Reporter() as report:
        state = run_detached(arguments, report)
        _print_ready(report, state.endpoint or "", "baton down")
    error_console().print(Text(f"log: {state.log_file}"), soft_wrap=True)


@app.command()
def down(
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait for the shutdown, in seconds.")] = 60.0,
) -> None:
    """Stop the cluster that `baton up` runs on this machine."""
    from cluster.cli.cli_up import stop_cluster

    with Reporter() as report:
        outcome = stop_cluster(timeout, report)
    _output().print(Text(outcome), soft_wrap=True)


@app.command()
def reload(
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait for the outcome, in seconds.")] = 30.0,
) -> None:
    """Read API keys and SLO classes again, without a restart."""
    from cluster.cli.cli_reload import reload_cluster

    _output().print(Text(reload_cluster(timeout)), soft_wrap=True)


@app.command()
def upgrade(
    config: ConfigOption = None,
    assignments: AssignmentsOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be replaced and why, only.")] = False,
) -> None:
    """Give the running cluster another configuration, worker by worker. No request fails.

    Without --config, each --set changes one value of the running configuration. With --config, the file and --set are
    the whole new configuration.
    """
    from baton.client.local_cluster import UpgradeRequest
    from cluster.cli.cli_up import check_configuration
    from cluster.cli.cli_upgrade import plan_for_running, upgrade_cluster
    from cluster.cli.run_record import ConfigSource

    if config is None and not assignments:
        raise typer.BadParameter("give --config, --set or both.")
    source = ConfigSource(None if config is None else str(config.absolute()), tuple(assignments or ()))
    new, planned = plan_for_running(source)
    for line in planned.texts():
        _output().print(Text(line), soft_wrap=True)
    if dry_run or not planned.changes:
        return
    check_configuration(new)
    request = UpgradeRequest(new.to_dict(), source.file, source.assignments)
    try:
        with Reporter() as report:
            outcome = upgrade_cluster(request, report.note)
    except KeyboardInterrupt:
        error_console().print(Text("\nThe upgrade goes on. `baton status` shows what is left of it."))
        raise
    _output().print(Text(outcome), soft_wrap=True)


@app.command("config")
def show_config(
    is_whole: Annotated[bool, typer.Option("--all", help="Show every key, not only those that differ.")] = False,
) -> None:
    """Show which keys of the running cluster differ from the defaults, and these, as YAML without secrets.

    This is the cluster that `baton up` runs on this machine. `baton scale` and the autoscaler change the sizes of pools
    without changing the configuration; see `baton status`.
    """
    from cluster.cli.cli_reload import running_state
    from cluster.config.config import BatonConfig
    from cluster.config.shown import shown_config

    shown = shown_config(BatonConfig.from_dict(running_state().config), is_whole=is_whole)
    sys.stdout.write(shown or "# Every key has its default, which --all shows.\n")


@app.command()
def status(
    as_json: JsonOption = False,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Show pools, workers, KV blocks and requests in flight."""
    from cluster.cli.cli_view import render_status

    address = find_endpoint(endpoint)
    answer = with_client(address, ca, lambda client: client.status())
    if as_json:
        sys.stdout.write(json.dumps({"endpoint": address, **answer}, indent=2) + "\n")
    else:
        _output().print(render_status(answer, address, _output().width))


@app.command()
def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="Id of a response, an X-Request-Id, or ID-INDEX for one choice of a response.")
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Explain the newest finished request.")] = False,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="Explain the slowest finished request that is kept, warm-ups left out.")
    ] = False,
    slowest_first_token: Annotated[
        bool, typer.Option("--slowest-first-token", help="Like --slowest, by the time until the first token.")
    ] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Show what was drafted and accepted, of a request with a trace.")
    ] = False,
    as_json: JsonOption = False,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Show where a request's time went, and what caused its delays."""
    from baton.explain.timelines import Order
    from cluster.cli.cli_explain import fetch_timeline, render_timeline
    from cluster.cli.cli_rounds import render_rounds

    if (request_id is not None) + last + slowest + slowest_first_token != 1:
        raise typer.BadParameter("give exactly one of REQUEST_ID, --last, --slowest and --slowest-first-token.")
    which: Order = "slowest" if slowest else "slowest_first_token" if slowest_first_token else "newest"
    timeline = with_client(endpoint, ca, lambda client: fetch_timeline(client, request_id, which))
    if as_json:
        sys.stdout.write(json.dumps(timeline, indent=2) + "\n")
    else:
        _output().print(render_rounds(timeline) if rounds else render_timeline(timeline, _output().width))


@app.command()
def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt, or - to read it from standard input. Omit it with --file.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help='JSONL file with {"prompt": ...} or {"messages": ...} in each line.'),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSONL file for the answers to --file, in order.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Do not wait for the batch of --file; `baton jobs` returns to it.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat/--completion", help="Apply the chat template, or send the prompt as it is.")
    ] = True,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of output tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always picks the most likely token. Default: 0, or the server's (1) with --top-p or --seed."
        ),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer, at any temperature.")] = None,
    service_tier: Annotated[
        str | None, typer.Option(metavar="CLASS", help="SLO class or service tier. Default: the server's.")
    ] = None,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Send one prompt and get the answer, or make a batch of a file of prompts."""
    from cluster.cli.cli_submit import check_source

    is_sampled = top_p is not None or seed is not None
    if temperature is None and not is_sampled:
        temperature = 0.0
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given["service_tier"] = service_tier
    options = {name: value for name, value in given.items() if value is not None}
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either a PROMPT or --file.")
    if prompt is not None:
        if output is not None:
            raise typer.BadParameter("--output requires --file.")
        if detach:
            raise typer.BadParameter("--detach requires --file.")
        if temperature == 0 and is_sampled:  # in a file, a line may have a temperature of its own
            raise typer.BadParameter(
                "--top-p and --seed have no effect at --temperature 0. Raise --temperature, or omit it."
            )
        prompt = sys.stdin.read() if prompt == "-" else prompt
        if not prompt.strip():
            raise typer.BadParameter("the PROMPT is empty.")
        _submit_one(endpoint, ca, prompt, options, chat=chat, stream=stream)
    elif file is not None:
        check_source(file)
        if stream:
            raise typer.BadParameter("--stream requires a PROMPT and does not work with --file.")
        if service_tier is not None:
            raise typer.BadParameter("--service-tier requires a PROMPT: the lines of --file run in the class batch.")
        if detach and output is not None:
            raise typer.BadParameter(
                "--output needs the end of the batch; leave out --detach, or use `baton jobs fetch`."
            )
        submit_job(endpoint, ca, file, output, options, chat=chat, detach=detach)


def _submit_one(
    endpoint: str | None, ca: Path | None, prompt: str, options: dict[str, Any], *, chat: bool, stream: bool
) -> None:
    from cluster.cli.cli_submit import submit_one

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    answer = with_client(
        endpoint, ca, lambda client: submit_one(client, prompt, options, chat=chat, stream=stream, show=show)
    )
    sys.stdout.write("\n")
    if answer.finish_reason == "length":
        error_console().print(
            Text(f"(truncated after {answer.usage.get('completion_tokens', '?')} tokens; see --max-tokens)")
        )


@app.command()
def scale(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="POOL=NUMBER...", help="New size of each pool, such as prefill=2 decode=auto."),
    ],
    wait: Annotated[bool, typer.Option(help="Wait until new workers are ready and removed workers have left.")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait, in seconds.")] = 300.0,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Change the number of workers of each pool while the cluster serves."""
    from cluster.cli.cli_scale import parse_targets
    from cluster.cli.cli_scale import scale as scale_pools

    numbers = parse_targets(targets)
    with Reporter() as report:
        wait_s = timeout if wait else None
        reached = with_client(endpoint, ca, lambda client: scale_pools(client, numbers, wait_s, report, report.note))
    _output().print(Text(", ".join(f"{pool}: {number}" for pool, number in reached.items())))


@model_app.command("pull")
def model_pull(
    name: Annotated[
        str, typer.Argument(help="smollm2-135m-instruct, a hub id (organization/name), or a .gguf file to convert.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every file's SHA-256 hash (default model only).")
    ] = False,
) -> None:
    """Fetch or convert a model and print its folder."""
    from cluster.cli.cli_model import pull

    with Reporter() as report:
        folder = pull(name, report, verify=verify)
    sys.stdout.write(f"{folder}\n")


@app.command()
def version() -> None:
    """Print the versions of baton and its main dependencies."""
    lines = [f"baton {metadata.version('baton-serve')}", f"python {platform.python_version()}"]
    lines += [f"{package} {metadata.version(package)}" for package in ("ray", "torch", "transformers", "grpcio")]
    sys.stdout.write("\n".join(lines) + "\n")


def _print_ready(report: Reporter, endpoint: str, how_to_stop: str) -> None:
    report.close()
    with suppress(OSError):  # the cluster serves, even if the disk of its log is full
        sys.stdout.write(f"{endpoint}\n")
        sys.stdout.flush()
    report.note(f'ready: baton submit "Hello" --stream    stop: {how_to_stop}')


def _output() -> Console:
    return Console()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
