"""An engine in a child process: results pass through a pipe unchanged, and failures are reported."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.core.errors import ConfigError
from benchmarks.offline import llama_cpp_engine
from benchmarks.offline.__main__ import Case, main, render, run_rounds
from benchmarks.offline.processes import started

ENGINE = """
import sys
from benchmarks.offline.protocol import serve

def load():
    print("a library's greeting")
    {load}
    def generate(prompts, max_tokens):
        print("a library's chatter")
        return {answer}
    return generate

serve(load)
"""


def command(load: str = "pass", answer: str = "[max_tokens] * len(prompts)") -> list[str]:
    return [sys.executable, "-c", ENGINE.format(load=load, answer=answer)]


def test_output_of_libraries_is_not_an_answer(tmp_path: Path) -> None:
    with started("one", command(), tmp_path / "log") as engine:
        assert engine.seconds([[1, 2], [3]], 4) > 0
    assert "greeting" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("answer", ["[max_tokens - 1] * len(prompts)", "[max_tokens]"])
def test_an_engine_that_returns_too_few_tokens_is_detected(answer: str, tmp_path: Path) -> None:
    with (
        started("lazy", command(answer=answer), tmp_path / "log") as engine,
        pytest.raises(ConfigError, match="lazy answered with"),
    ):
        engine.seconds([[1], [2]], 4)


@pytest.mark.parametrize("load", ["raise SystemExit('no such model')", "import os; sys.stdout.flush(); os._exit(3)"])
def test_an_engine_that_cannot_start_reports_the_reason(load: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)broken ended.*greeting"),
        started("broken", command(load), tmp_path / "log"),
    ):
        pass


def test_an_engine_that_dies_while_running_is_reported(tmp_path: Path) -> None:
    with started("mortal", command(answer="sys.exit('out of memory')"), tmp_path / "log") as engine:
        for _ in range(2):
            with pytest.raises(ConfigError, match="mortal ended"):
                engine.seconds([[1]], 1)


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="absent cannot be started"),
        started("absent", ["/no/such"], tmp_path / "log"),
    ):
        pass


def test_rounds_alternate_and_the_first_is_not_counted(tmp_path: Path) -> None:
    with started("a", command(), tmp_path / "a") as one, started("b", command(), tmp_path / "b") as two:
        times = run_rounds(Case(2, 3, 0), [one, two], rounds=2, seed=0)
    assert {name: len(own) for name, own in times.items()} == {"a": 2, "b": 2}


def test_prompts_differ_between_rounds_and_have_the_requested_length() -> None:
    rng = random.Random(0)
    first, second = (Case(2, 5, 1).prompts(rng) for _ in range(2))
    assert first != second
    assert [len(prompt) for prompt in (*first, *second)] == [5] * 4


def test_the_table_has_rates_and_ratios() -> None:
    table = render([(Case(4, 8, 10), {"a": [1.0, 2.0, 4.0], "b": [2.0, 4.0, 4.0]})])
    assert [list(column.cells) for column in table.columns] == [["decode, batch 4"], ["20"], ["10"], ["2.00"]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["vllm"], "vllm requires --vllm-python"),
        (["llama-cpp"], "llama-cpp requires --llama-python"),
        (["llama-cpp", "--llama-python", "python3"], "and --llama-gguf"),
        (["llama-cpp", "--llama-python", "python3", "--llama-gguf", "a.gguf"], "use --batches 1"),
    ],
)
def test_other_engines_report_what_they_need(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "--engines", *given])
    with pytest.raises(SystemExit):
        main()
    assert said in " ".join(capsys.readouterr().err.split())


def test_llama_cpp_decodes_greedily_after_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token but the last is computed on: as many forwards as the engines beside it run."""
    seen: list[list[int]] = []

    class Llama:
        def __init__(self, gguf_file: str, **options: int) -> None:
            assert (gguf_file, options["n_ctx"]) == ("a.gguf", 32)

        def reset(self) -> None:
            seen.clear()

        def eval(self, tokens: list[int]) -> None:
            seen.append(tokens)

        def sample(self, temp: float) -> int:
            assert temp == 0.0
            return 7

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    assert llama_cpp_engine.load("a.gguf", 32)([[1], [2, 3]], 3) == [3, 3]
    assert seen == [[2, 3], [7], [7]]
