"""``benchmarks.speculation`` on tiny models: every method that can run, and the report of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from baton.core.errors import ConfigError
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.loading import LoadedDraft
from baton.engine.models.model_loader import prepare_model
from benchmarks.options import run_command
from benchmarks.speculation import SpeculationSettings, command, run_on
from benchmarks.speculation_report import SpeculationReport
from benchmarks.speculation_target import EngineFactory, Target
from benchmarks.speculation_workloads import Workload
from cluster.config.config import BatonConfig
from tests.tiny_drafts import VOCAB, tiny_eagle3, tiny_target
from tests.tiny_models import build_model
from tests.tiny_tokenizers import byte_level_tokenizer

MAX_TOKENS = 10
METHODS = ("auto", "eagle3", "lookahead", "ngram", "suffix")


def text(renderable: object) -> str:
    screen = io.StringIO()
    Console(file=screen, width=250).print(renderable)
    return screen.getvalue()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    model = tiny_target()
    folder = tiny_eagle3().write(tmp_path_factory.mktemp("head"))
    head = load_eagle(folder, model, torch.float32, torch.device("cpu"))
    config = BatonConfig.from_dict({"model": "a/tiny-one", "engine": {"block_size": 4, "threads": 1}})
    loaded = prepare_model(model, "float32")
    return Target(config, loaded, byte_level_tokenizer(), LoadedDraft("eagle3", "head", head))


def workloads() -> list[Workload]:
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(1, VOCAB, (4, 9), generator=generator).tolist()
    return [Workload("repeated", ((5, 6, 7, 8) * 4, (9, 5, 4) * 5)), Workload("random", tuple(map(tuple, random)))]


@pytest.fixture(scope="module")
def found(target, tmp_path_factory) -> SpeculationReport:
    settings = SpeculationSettings(
        batches=(1, 3), max_tokens=MAX_TOKENS, rounds=2, requests=2, out=tmp_path_factory.mktemp("out") / "new"
    )
    return run_on(target, workloads(), settings, lambda line: None)


def test_every_method_that_can_run_is_measured_in_every_cell(found):
    cells = [(r.cell.workload, r.cell.temperature, r.cell.batch, r.cell.method) for r in found.results]
    assert cells == [
        (workload, temperature, batch, method)
        for workload in ("repeated", "random")
        for temperature in (0.0, 0.8)
        for batch in (1, 3)
        for method in METHODS
    ]
    assert set(found.left_out) == {"draft_model", "eagle", "medusa"}
    assert "eagle3" in found.left_out["medusa"]


def test_the_figures_of_the_report_are_consistent(found):
    for result in found.results:
        tally = result.tally
        assert 0 < tally.num_tokens <= 2 * result.cell.batch * (MAX_TOKENS - 1)  # some answers end before
        assert tally.num_tokens == tally.num_rounds + tally.num_accepted
        assert tally.num_accepted == sum(tally.accepted) <= tally.num_verified <= tally.num_drafted
        assert sum(tally.by_method.values()) == tally.num_rounds
        assert len(tally.draft_ms) == len(tally.verify_ms) >= tally.num_rounds / result.cell.batch
        assert 0 < result.num_requests <= 2 * result.cell.batch
        assert result.num_failures == 0
        assert result.tpot_ms > 0 < result.plain_tpot_ms
    by_method = {result.cell.method: result for result in found.results}
    for name in ("eagle3", "lookahead"):
        assert set(by_method[name].tally.by_method) <= {name, "none"}
        assert by_method[name].tally.by_method[name]


def test_tokens_match_plain_decoding(found):
    equality = found.equality()
    assert equality == {"num_requests": len(METHODS) * 2 * 2 * (2 + 6), "num_different": 0, "expected_equal": True}
    assert f"float32: all {equality['num_requests']} requests got the same tokens" in text(found.render())


def test_the_json_report_is_complete(found):
    written = json.loads((Path(found.settings["out"]) / "speculation.json").read_text())
    assert written == json.loads(json.dumps(found.to_dict()))
    assert written["environment"]["draft"] == {"name": "head", "method": "eagle3"}
    assert written["settings"]["batches"] == [1, 3]
    cell, result = written["cells"][1], found.results[1]
    assert (cell["method"], cell["workload"], cell["temperature"], cell["batch"]) == ("eagle3", "repeated", 0.0, 1)
    assert cell["tau"] == pytest.approx(result.tally.tau, abs=1e-4)
    assert cell["acceptance_by_position"] == pytest.approx(result.tally.acceptance, abs=1e-4)
    assert cell["rounds_by_position"]["offered"] == result.tally.offered
    assert cell["tpot_ms"] == pytest.approx({"off": result.plain_tpot_ms, "on": result.tpot_ms}, abs=1e-4)
    assert cell["speedup_of_each_pair"] == pytest.approx(result.speedups, abs=1e-4)
    assert sum(cell["share_of_rounds_by_method"].values()) == pytest.approx(1, abs=1e-3)
    assert len(list(Path(found.settings["out"]).iterdir())) == 1


def test_the_table_shows_each_cell(found):
    lines = text(found.render()).splitlines()
    for method in METHODS:
        rows = [line for line in lines if line.split()[:1] == [method] and "% of rounds" not in line]
        assert len(rows) == len(found.results) / len(METHODS)
    assert sum(line.startswith("auto at T 0.8, batch 3: ") for line in lines) == 2
    assert any(line.startswith("left out: medusa: ") for line in lines)


def test_differing_tokens_are_named(found):
    first = found.results[0]
    spoiled = SpeculationReport(found.environment, found.settings, {}, [first])
    changed = [type(run)(((0,),) * len(run.token_ids), *_timing(run)) for run in first.speculative]
    spoiled.results = [type(first)(first.cell, first.plain, changed, first.tally, num_failures=1)]
    shown = text(spoiled.render())
    assert "2 of 2 requests got DIFFERENT tokens" in shown
    assert "a method failed" in shown
    spoiled.environment = {**found.environment, "dtype": "bfloat16"}
    assert "2 of 2 requests got different tokens than without speculation: in bfloat16" in text(spoiled.render())
    assert not spoiled.equality()["expected_equal"]


def _timing(run) -> tuple[tuple[float, ...], float, int]:
    return run.tpots_ms, run.decode_ms, run.num_decode_tokens


def test_naming_a_method_that_cannot_run_is_refused(target):
    with pytest.raises(ConfigError, match="medusa, but head is for the method eagle3"):
        EngineFactory(target, 1, 9, MAX_TOKENS).choose_methods(["ngram", "medusa"])


def test_prompts_longer_than_the_context_are_refused(target):
    with pytest.raises(ConfigError, match="longest prompt has 125 tokens; with 10 to generate"):
        EngineFactory(target, 1, 125, 10)


def test_batches_that_exceed_memory_are_refused_before_allocation(target, monkeypatch):
    monkeypatch.setattr("benchmarks.speculation_target._free_memory", lambda device: 2**28)
    monkeypatch.setattr(Target, "runner", lambda *arguments, **options: pytest.fail("it was taken"))
    with pytest.raises(ConfigError, match=r"9000 sequences at once need two KV caches of \S+ GiB .* only 0\.2 GiB"):
        EngineFactory(target, 9000, 9, MAX_TOKENS)


# --- the command ---


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = run_command(command, "benchmarks.speculation", arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    build_model(LlamaConfig(vocab_size=512, max_position_embeddings=256, **sizes)).save_pretrained(folder)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello world"}\n{"prompt": "the lazy dog, the lazy"}\n')
    return tmp_path / "prompts.jsonl"


SIZES = "--batches 2 --temperatures 0 --max-tokens 6 --rounds 1 --requests 1 --threads 1"


def options(model_folder: Path, prompts: Path) -> list[str]:
    return [
        *SIZES.split(),
        "--model",
        str(model_folder),
        "--dtype",
        "float32",
        "--workloads",
        "own",
        "--prompts",
        f"own={prompts}",
    ]


def test_the_command_measures_a_model_folder(bench, model_folder, prompts, tmp_path):
    status, out, err = bench(*options(model_folder, prompts), "--methods", "auto,none", "-o", "results")
    assert status == 0, err
    assert "2 of 2: none, own, temperature 0, batch 2" in err
    assert "all 4 requests got the same tokens" in out
    assert "…" not in "".join(out.splitlines()[:6])
    written = json.loads((tmp_path / "results" / "speculation.json").read_text())
    assert [cell["method"] for cell in written["cells"]] == ["auto", "none"]
    assert written["cells"][1]["tau"] == 1.0
    assert written["settings"]["methods"] == ["auto", "none"]


def test_an_unwritable_folder_is_refused_before_loading_a_model(bench, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = bench("--out", str(tmp_path / "file" / "out"))
    assert status == 1
    assert "--out cannot be written" in err
    assert "loading" not in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "auto,ngrm"], "no speculation method 'ngrm'; expected one of: auto, none, draft_model,"),
        (["--methods", "ngrm"], "Did you mean ngram?"),
        (["--workloads", "poems"], "no workload 'poems'; expected one of: chat, code, summarise, story, explanation,"),
        (["--workloads", "mine", "--prompts", "my=x.jsonl"], "rewriting, table, translation, my."),
        (["--batches", "1,two"], "--batches must be whole numbers"),
        (["--batches", "0"], "--batches, --rounds and --requests must be at least 1"),
        (["--batches", ""], "--batches needs at least one number"),
        (["--batches", "1,1000"], "--batches has 1000, but an engine runs at most 64 sequences at once"),
        (["--set", "decode.max_num_seqs=3"], "has 16, but an engine runs at most 3 sequences"),
        (["--methods", "none"], "--methods none would measure plain decoding against itself. Give a method"),
        (
            ["--methods", ""],
            "--methods is empty. Give names separated by commas, or leave the option out to select all",
        ),
        (["--workloads", " ,"], "--workloads is empty."),
        (["--temperatures", "hot"], "--temperatures must be numbers"),
        (["--temperatures", "-1"], "--temperatures must be between"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--dtype", "int4"], "dtype"),
    ],
)
def test_unknown_names_are_refused_before_loading_a_model(bench, arguments, complaint):
    status, out, err = bench(*arguments, "--model", "nobody/has-such-a-model")
    assert (status, out) == (1, "")
    assert complaint in err
    assert "loading" not in err


def test_help_names_the_options(bench):
    status, out, _ = bench("--help")
    assert status == 0
    for option in ("--methods", "--workloads", "--batches", "--temperatures", "--rounds", "--out", "--prompts"):
        assert option in out
