"""The three commands as users start them, against a reference server in another thread.

Each test ends within seconds even where it interrupts a run: all loads are bounded.
"""

import asyncio
import json
import os
import re
import signal
import threading
from importlib import metadata

import pytest

from baton.bench import command
from baton.bench import document as document_module
from baton.bench.document import environment
from baton.bench.session import without_interruption
from baton.bench.stage_result import evaluate
from cluster.cli.cli import run
from tests.reference_server import ReferenceServer, Schedule
from tests.serving_reference import serving


def interrupt_later(server: ReferenceServer, num_requests: int):
    """Presses Ctrl-C when the server has had so many requests."""

    async def check(request: object, response: object) -> None:
        if len(server.bodies) == num_requests:
            os.kill(os.getpid(), signal.SIGINT)

    return check


@pytest.fixture
def reference(monkeypatch):
    """Starts reference servers; each is gone after the test."""
    monkeypatch.delenv("BATON_ENDPOINT", raising=False)
    stops = []

    def start(schedule: Schedule, interrupt_after: int = 0) -> str:
        started, urls = threading.Event(), []
        loop, stop = asyncio.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            server = ReferenceServer(schedule)
            if interrupt_after:
                server.application.on_response_prepare.append(interrupt_later(server, interrupt_after))
            async with serving(server.application) as url:
                urls.append(url)
                started.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        stops.append((loop, stop, thread))
        assert started.wait(10)
        return urls[0]

    yield start
    for loop, stop, thread in stops:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture
def quick(reference) -> str:
    return reference(Schedule(0.002, 0.001))


def bench(*arguments: object) -> int:
    return run(["bench", *map(str, arguments)])


def test_serve_writes_all_requested_reports(quick, tmp_path, capsys):
    status = bench(
        "serve", "--url", quick, "--concurrency", "1,2", "--requests", 20, "--input", "uniform:5-30", "--output", 4,
        "--slo", "ttft=10s,tpot=10s", "--json", tmp_path / "a.json", "--samples",
        "--api-key", "very-secret", "--service-tier", "batch",
    )  # fmt: skip
    assert status == 0
    shown = capsys.readouterr().out
    assert "2 at once" in shown
    assert "TTFT <= 10000 ms" in shown
    text = (tmp_path / "a.json").read_text()
    assert "very-secret" not in text
    document = json.loads(text)
    assert (document["format"], document["version"]) == ("baton-bench-serve", 2)
    assert document["settings"]["workload"]["input"] == "uniform:5-30"
    assert document["settings"]["target"]["service_tier"] == "batch"
    assert document["settings"]["load"]["concurrency"] == [1, 2]
    assert document["environment"]["packages"]["aiohttp"]
    for stage, warmup in zip(document["stages"], (1, 2), strict=True):
        assert stage["num_failed"] == 0
        assert stage["num_measured"] >= 20
        assert stage["goodput"]["attainment"] == 1.0
        assert stage["latencies"]["tpot_ms"]["p50"] > 0
        assert len(stage["samples"]) == stage["num_measured"] + warmup
        assert all(s["input_tokens"] == s["wanted_input"] for s in stage["samples"])
        assert all(s["output_tokens"] == 4 for s in stage["samples"])
    samples = [sample for stage in document["stages"] for sample in stage["samples"]]
    assert all(sample["request_id"].startswith("reference-") for sample in samples)
    assert len({sample["request_id"] for sample in samples}) == len(samples)
    measured = [sample for sample in samples if not sample["is_warmup"]]
    slowest = max(measured, key=lambda sample: sample["first_token_s"] - sample["sent_s"])["request_id"]
    assert re.search(rf"slowest first token: \d+\.\d\d s \(baton explain {slowest}\)", shown)


def test_a_trace_is_replayed(quick, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 400 * n, "input_length": 600, "output_length": 8, "hash_ids": [0, n + 1]} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    status = bench(
        "serve", "--url", quick, "--trace", trace, "--trace-seconds", 4, "--arrival", "trace", "--speed-up", 40,
        "--input-scale", "auto", "--max-input", 60, "--output-scale", 0.5, "--json", tmp_path / "a.json", "--samples",
    )  # fmt: skip
    assert status == 0
    (stage,) = json.loads((tmp_path / "a.json").read_text())["stages"]
    assert stage["num_measured"] == 10  # of the first four seconds
    assert [sample["intended_s"] for sample in stage["samples"]] == pytest.approx([0.01 * n for n in range(10)])
    assert {(s["input_tokens"], s["output_tokens"]) for s in stage["samples"]} == {(60, 4)}


def test_an_interrupt_shows_and_writes_partial_results(reference, tmp_path, capsys):
    url = reference(Schedule(0.005, 0.0), interrupt_after=30)
    arguments = ("--concurrency", "2,4", "--requests", 10**6, "--duration", 60, "--json", tmp_path / "a.json")
    assert bench("serve", "--url", url, *arguments) == 130
    assert "interrupted" in capsys.readouterr().out
    (stage,) = json.loads((tmp_path / "a.json").read_text())["stages"]
    assert stage["is_interrupted"]
    assert stage["num_measured"] > 0
    assert stage["num_failed"] == 0


def test_an_interrupt_between_stages_ends_the_run(quick, tmp_path, capsys, monkeypatch):
    def evaluate_and_interrupt(run, slo):
        """After the first stage only: a second signal would end the process at once."""
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(command, "evaluate", evaluate)
        return evaluate(run, slo)

    monkeypatch.setattr(command, "evaluate", evaluate_and_interrupt)
    arguments = ("--concurrency", "1,2", "--requests", 5, "--json", tmp_path / "a.json")
    assert bench("serve", "--url", quick, *arguments) == 130
    assert "interrupted: 1 of 2 stages have no results" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert len(document["stages"]) == 1


@pytest.mark.parametrize("arguments", [("serve",), ("sweep", "--slo", "ttft=1s")])
def test_an_interrupt_before_the_load_ends_the_run(reference, capsys, arguments):
    """The server says nothing for a minute: it is the interrupt that ends the wait for its first answer."""
    url = reference(Schedule(60.0, 0.0), interrupt_after=1)
    name, *rest = arguments
    assert bench(name, "--url", url, *rest) == 130
    assert "interrupted before" in capsys.readouterr().out


def test_results_that_cannot_be_written_are_displayed(quick, tmp_path, capsys, monkeypatch):
    def fail(document, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(document_module, "write_json", fail)
    assert bench("serve", "--url", quick, "--requests", 3, "--json", tmp_path / "a.json") == 1
    shown = capsys.readouterr()
    assert "No space left" in " ".join(shown.err.split())
    assert "1 at once" in shown.out + shown.err


def test_a_sweep_without_measurements_suggests_what_to_change(quick, capsys):
    status = bench(
        "sweep", "--url", quick, "--slo", "ttft=1s", "--start-rate", 0.1, "--duration", 0.01, "--repeats", 2,
        "--warmup-requests", 0, "--output", 1,
    )  # fmt: skip
    assert status == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "No request was measured at 0.1/s" in shown
    assert "--duration" in shown


def test_the_version_of_an_uninstalled_package_is_unknown(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("baton.core.version.version", missing)
    assert environment()["packages"]["baton-serve"] == "unknown"


def test_a_run_without_answers_fails(reference, tmp_path):
    # The first two requests settle how the server is talked to.
    url = reference(Schedule(0.0, 0.0, fail_every=2))
    assert bench("serve", "--url", url, "--requests", 1, "--warmup-requests", 0, "--prompts", _prompts(tmp_path)) == 1


def _prompts(folder):
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n')
    return file


def test_compare_distinguishes_better_from_worse(quick, reference, tmp_path, capsys):
    slow = reference(Schedule(0.05, 0.02))
    for name, url in (("a", slow), ("b", quick), ("c", quick)):
        requests = 12 if name == "c" else 10
        file = tmp_path / f"{name}.json"
        assert bench("serve", "--url", url, "--requests", requests, "--output", 5, "--json", file) == 0
    capsys.readouterr()
    assert bench("compare", tmp_path / "a.json", tmp_path / "b.json") == 0
    shown = capsys.readouterr().out
    assert _verdict(shown, "TPOT p50") == "better"
    assert "settings.target.url" in shown
    assert bench("compare", tmp_path / "b.json", tmp_path / "a.json") == 0
    assert _verdict(capsys.readouterr().out, "output tokens/s") == "worse"
    assert bench("compare", tmp_path / "b.json", tmp_path / "c.json") == 0
    assert "settings.load.requests: 10 and 12" in capsys.readouterr().out
    assert bench("compare", tmp_path / "a.json", tmp_path / "a.json") == 0
    shown = capsys.readouterr().out
    assert "settings of the two reports differ" not in shown
    assert _verdict(shown, "TPOT p50") == _verdict(shown, "output tokens/s") == "same"


def _verdict(shown, figure):
    """The last word of a figure's row."""
    return next(line for line in shown.splitlines() if figure in line).split()[-1]


def test_compare_refuses_files_of_another_kind(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"format": "baton-bench-serve", "version": 99, "stages": []}')
    assert bench("compare", other, other) == 1
    assert "version 99" in " ".join(capsys.readouterr().err.split())
    assert bench("compare", tmp_path / "none.json", other) == 1


def test_sweep_finds_the_capacity_of_one_slot(reference, tmp_path, capsys):
    """One slot and 20 ms a request: 50 requests/s at most, and fewer in time when they come at random."""
    url = reference(Schedule(0.02, 0.0, slots=1))
    status = bench(
        "sweep", "--url", url, "--slo", "ttft=100ms", "--percentile", 80, "--start-rate", 25, "--max-rate", 200,
        "--precision", 0.5, "--requests", 25, "--duration", 5, "--repeats", 1, "--warmup-requests", 0,
        "--output", 1, "--json", tmp_path / "sweep.json",
    )  # fmt: skip
    assert status == 0
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert document["format"] == "baton-bench-sweep"
    assert document["is_complete"]
    assert document["goodput_requests_per_s"] < 100
    assert document["failed_at_requests_per_s"] > document["goodput_requests_per_s"]
    assert "Goodput:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("serve", "--input", "lognorml:median=1,p95=2"), "Did you mean lognormal"),
        (("serve", "--model", "referense"), "Did you mean reference"),
        (("serve", "--concurrency", "1", "--rate", "2"), "Give only one kind"),
        (("serve", "--concurrency", "many"), "whole numbers"),
        (("serve", "--json", "/dev/null/a.json"), "--json cannot be written"),
        (("serve", "--json", "/"), "--json cannot be written"),
        (("sweep", "--slo", "ttft=1s", "--json", "/dev/null/a.json"), "--json cannot be written"),
        (("serve", "--extra-body", "[1]"), "must be a JSON object"),
        (("serve", "--tokenizer", "/nowhere"), "/nowhere"),
        (("serve", "--trace", "/nowhere"), "cannot read"),
        (("serve", "--input-scale", "auto"), "requires --trace"),
        (("serve", "--input", "1e9"), "--input: 1000000000 tokens are more than 10000000"),
        (("serve", "--rate", "nan"), "--rate must be numbers separated by commas, such as 0,0.8; got 'nan'"),
        (("serve", "--duration", "0"), "--duration must be a number above 0; got 0."),
        (("serve", "--timeout", "inf"), "--timeout must be a number above 0; got inf."),
        (("serve", "--temperature", "inf"), "--temperature must be a number of at least 0; got inf."),
        (("serve", "--trace-seconds", "inf"), "--trace-seconds must be a number above 0; got inf."),
        (("serve", "--slo", ""), "must have at least one limit"),
        (("sweep", "--slo", "ttft=1s", "--max-rate", "inf"), "--max-rate must be a number above 0 and at most 1e+06"),
        (("sweep", "--slo", "ttft=1s", "--precision", "nan"), "--precision must be a number above 0; got nan."),
        (("sweep", "--slo", ""), "must have at least one limit"),
        (("sweep", "--slo", "ttft=1s", "--percentile", "100"), "--percentile"),
        (("sweep", "--slo", "ttft=1s", "--start-rate", "0.001"), "in ascending order"),
        (("sweep", "--slo", "ttft=1s", "--arrival", "trace"), "varies the rate"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(quick, capsys, arguments, fragment):
    name, *rest = arguments
    assert bench(name, "--url", quick, *rest) == 1
    assert fragment in " ".join(capsys.readouterr().err.split())


NOBODY = "http://127.0.0.1:9/v1"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TRACE").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}')
    (tmp_path / "PROMPTS").write_text('{"prompt": "one two"}')


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("serve", "--input", "lognorml:median=1,p95=2"), "Did you mean lognormal"),
        (("serve", "--prompts", "/nowhere"), "--prompts: cannot read"),
        (("serve", "--prompts", "/nowhere", "--trace", "/nowhere"), "both define the requests"),
        (("serve", "--rate", "1", "--burstiness", "0.5"), "--burstiness would have no effect without --arrival bursty"),
        (("serve", "--rate", "1", "--speed-up", "2"), "--speed-up would have no effect without --arrival trace"),
        (
            ("serve", "--concurrency", "2", "--max-inflight", "2"),
            "--max-inflight would have no effect in a closed loop",
        ),
        (("serve", "--max-inflight", "2"), "--max-inflight would have no effect in a closed loop"),
        (
            ("serve", "--trace-start", "1", "--trace-format", "azure"),
            "--trace-format, --trace-start would have no effect",
        ),
        (("serve", "--trace-seconds", "9"), "--trace-seconds would have no effect without --trace"),
        (("serve", "--trace", "TRACE", "--input", "9", "--output", "9"), "--input, --output would have no effect"),
        (("serve", "--prompts", "PROMPTS", "--max-input", "9"), "--max-input would have no effect with --prompts"),
        (
            ("serve", "--prompts", "PROMPTS", "--input-scale", "0.5"),
            "--input-scale would have no effect with --prompts",
        ),
        (("serve", "--samples"), "--samples writes every request to the file of --json"),
        (("sweep", "--slo", "ttft=1s", "--input", "many"), "--input: 'many' is not a number"),
        (
            ("sweep", "--slo", "ttft=1s", "--burstiness", "2"),
            "--burstiness would have no effect without --arrival bursty",
        ),
        (("sweep", "--slo", "ttft=1s", "--trace-seconds", "2"), "--trace-seconds would have no effect without --trace"),
    ],
)
def test_options_are_checked_before_the_server_is_contacted(files, capsys, arguments, fragment):
    name, *rest = arguments
    assert bench(name, "--url", NOBODY, *rest) == 1
    assert fragment in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--rate", "1", "--arrival", "bursty", "--burstiness", "0.5", "--max-inflight", "9"),
        ("serve", "--trace", "TRACE", "--arrival", "trace", "--speed-up", "2", "--trace-seconds", "9"),
        ("serve", "--prompts", "PROMPTS", "--output", "9", "--context", "99"),
        ("serve", "--input", "9", "--input-scale", "0.5"),
        ("sweep", "--slo", "ttft=1s", "--max-inflight", "9", "--trace", "TRACE", "--arrival", "constant"),
    ],
)
def test_options_reach_the_server(files, capsys, arguments):
    name, *rest = arguments
    assert bench(name, "--url", NOBODY, *rest) == 1
    assert "Is the server running?" in " ".join(capsys.readouterr().err.split())


def test_a_prompt_beyond_the_context_is_refused_before_generation(reference, capsys):
    url = reference(Schedule(0.0, 0.0, max_model_len=512))
    assert bench("serve", "--url", url, "--input", 600, "--output", 4) == 1
    assert "a prompt of 600 tokens does not fit into the context of 512" in " ".join(capsys.readouterr().err.split())
    assert bench("serve", "--url", url, "--input", 600, "--output", 4, "--requests", 2, "--context", 512) == 0


def test_an_unreachable_server_is_reported(capsys):
    assert bench("serve", "--url", NOBODY) == 1
    assert "Is the server running?" in " ".join(capsys.readouterr().err.split())


def test_reports_are_written_despite_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with without_interruption():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
