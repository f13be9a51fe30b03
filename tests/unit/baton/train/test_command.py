"""``baton train`` from a model folder to a draft that the configuration can name."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.draft.loading import load_draft
from baton.engine.models.model_loader import prepare_model
from baton.engine.models.tokenizer import Tokenizer
from baton.train import trainer
from baton.train.command import _for_others
from baton.train.dataset import AnswerDataset
from baton.train.display import Display
from baton.train.options import MedusaOptions
from cluster.cli import cli
from tests.tiny_drafts import tiny_eagle3
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.baton.train.conftest import sharp_target

Baton = Callable[..., tuple[int, str, str]]
KINDS = {
    "eagle3": ("eagle3", ["--draft-vocab", "64", "--ttt-steps", "2"]),
    "medusa": ("medusa", ["--draft-vocab", "64", "--heads", "2"]),
    "draft": ("draft_model", ["--layers", "2"]),
}


def write_model(folder: Path, tokenizer: Tokenizer) -> Path:
    model = sharp_target(vocab=tokenizer.vocab_size)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of chats, one of plain texts, and prompts."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "tiny", byte_level_tokenizer())
    write_model(folder / "plain", byte_level_tokenizer(chat_template=None))
    lines = [json.dumps({"prompt": f"hello {word} {number}"}) for word in ("fox", "dog") for number in range(9)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def baton(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Baton:
    """Trains with small numbers: (exit status, stdout, stderr). Options that are given win."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    defaults = {
        "--model": str(home / "tiny"),
        "--prompts": str(home / "prompts.jsonl"),
        "--self-prompts": "0",
        "--tokens": "1500",
        "--max-answer-tokens": "16",
        "--batch": "8",
        "--epochs": "2",
    }

    def run(kind: str, *options: str, without: tuple[str, ...] = ()) -> tuple[int, str, str]:
        given = {name: value for name, value in defaults.items() if name not in options and name not in without}
        arguments = [word for pair in given.items() for word in pair]
        status = cli.run(["train", kind, *arguments, *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_trains_a_draft_from_a_model(baton: Baton, home: Path, kind: str) -> None:
    method, options = KINDS[kind]
    status, shown, progress = baton(kind, "--out", "made/draft", "--seed", "3", "--no-cache-states", *options)
    assert status == 0, progress
    assert "speculation: {draft: made/draft}" in shown
    assert "draft 2" in shown
    assert re.search(r"^collecting answers: \d+%", progress, re.MULTILINE)
    assert "evaluating" in progress

    model = sharp_target(vocab=byte_level_tokenizer().vocab_size)
    written = [path for path in Path("made").rglob("*") if path.is_file()]
    plain = Path("plain")
    plain.touch()
    assert {path.suffix for path in written} >= {".safetensors", ".json", ".md"}
    assert {path.stat().st_mode for path in written} == {plain.stat().st_mode}

    loaded = load_draft("made/draft", "tiny", str(home / "tiny"), prepare_model(model, "float32"))
    assert loaded is not None
    assert loaded.method == method

    card = Path("made/draft/README.md").read_text(encoding="utf-8")
    command = re.search(r"```\n(baton train .*)\n```", card)
    assert command is not None
    words = command[1].split()
    assert words[:3] == ["baton", "train", kind]
    for word in ("--prompts", "prompts.jsonl", "--no-cache-states", "made/draft", *options):
        assert word in words
    assert "--dtype" not in words  # which was not given
    assert "at temperature 0 and 0.8, to prompts from prompts.jsonl." in card


def test_drafts_of_all_kinds_share_the_answers_of_a_target(baton: Baton, tmp_path: Path) -> None:
    assert baton("medusa", "--draft-vocab", "64")[0] == 0
    status, _, progress = baton("draft", "--layers", "1")
    assert status == 0
    assert "collecting" not in progress
    assert len(list((tmp_path / "cache" / "train").glob("tiny-*/answers"))) == 1
    assert {folder.name for folder in Path("out").iterdir()} == {"tiny-medusa", "tiny-draft"}


@pytest.mark.parametrize("stage", ["collecting", "training"])
def test_repeating_the_command_after_ctrl_c_resumes_training(
    baton: Baton, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    steps: list[int] = []
    show_training, show_collecting = Display.progressed, Display.collected

    def progressed(self: Display, told: trainer.Progress) -> None:
        show_training(self, told)
        if told.stage == "training":
            steps.append(told.num_steps)
            if stage == "training" and len(steps) == 1:
                signal.raise_signal(signal.SIGINT)

    def collected(self: Display, num_tokens: int, total: int) -> None:
        show_collecting(self, num_tokens, total)
        if stage == "collecting" and not steps and num_tokens > 300:
            steps.append(0)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "progressed", progressed)
    monkeypatch.setattr(Display, "collected", collected)
    options = ("--work", "work", "--epochs", "30", "--draft-vocab", "64")
    status, shown, progress = baton("medusa", *options)
    assert status == 130
    assert shown == ""
    assert "stopped. The progress is on disk; the same command resumes the training: baton train medusa" in (progress)
    meta = json.loads(Path("work/answers/dataset.json").read_text(encoding="utf-8"))
    before = AnswerDataset(Path("work/answers"), meta["settings"]).num_answer_tokens
    assert 300 < before < 1500 if stage == "collecting" else before >= 1500

    status, shown, _ = baton("medusa", *options)
    assert status == 0
    assert "checkpoint: out/tiny-medusa (30 steps" in shown
    assert steps == [0, 20] if stage == "collecting" else steps == [20]


def test_repeating_the_command_after_ctrl_c_resumes_the_evaluation(
    baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    show, num_evaluations = Display.progressed, 0

    def progressed(self: Display, told: trainer.Progress) -> None:
        nonlocal num_evaluations
        show(self, told)
        if told.stage == "evaluation":
            num_evaluations += 1
            if num_evaluations == 1:
                raise KeyboardInterrupt  # as a second Ctrl-C: it waits for no group of answers

    monkeypatch.setattr(Display, "progressed", progressed)
    options = ("--work", "work", "--epochs", "30", "--draft-vocab", "64")
    status, shown, progress = baton("medusa", *options)
    assert (status, shown, num_evaluations) == (130, "", 1), progress
    assert Path("out/tiny-medusa/model.safetensors").is_file()
    status, _, progress = baton("medusa", *options)
    assert status == 0, progress
    log = json.loads(Path("out/tiny-medusa/training_log.json").read_text(encoding="utf-8"))
    assert log["acceptance"]["greedy"]["reached"]


def test_a_finished_run_is_not_repeated(baton: Baton) -> None:
    first = baton("medusa", "--draft-vocab", "64")
    weights = Path("out/tiny-medusa/model.safetensors").read_bytes()
    second = baton("medusa", "--draft-vocab", "64")
    assert (first[0], second[0]) == (0, 0)
    assert Path("out/tiny-medusa/model.safetensors").read_bytes() == weights
    assert "reading answers" not in second[2]


def test_a_model_without_a_template_trains_on_plain_text(baton: Baton, home: Path) -> None:
    model = ("--model", str(home / "plain"))
    status, _, progress = baton("medusa", *model, "--draft-vocab", "64", without=("--self-prompts",))
    assert status == 0
    assert "plain has no chat template: prompts are used as plain text" in progress
    status, _, progress = baton("medusa", *model, without=("--self-prompts", "--prompts"))
    assert status == 1
    assert "has no chat template, so it cannot write user turns of its own. Give at least one file" in progress
    status, _, progress = baton("medusa", *model, "--self-prompts", "0.5")
    assert status == 1
    assert "--self-prompts is 0.5, but" in progress


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-answer-tokens", "128"], "has only 128 tokens. Lower it to leave tokens for prompts."),
        (["--temperatures", "0,hot"], "--temperatures must be numbers separated by commas"),
        (["--temperatures", ""], "--temperatures is (), expected at least one number, all from 0 to 2."),
        (["--minutes", "0"], "--minutes must be greater than 0, got 0.0."),
        (["--kv-heads", "3"], "num_kv_heads is 3, which does not divide the 4 attention heads"),
        (["--prompts", "missing.jsonl"], "prompts: missing.jsonl cannot be read"),
        (["--model", "missing"], "'missing' is not the bundled model"),
    ],
)
def test_wrong_options_are_refused_before_collecting(baton: Baton, options: list[str], message: str) -> None:
    status, shown, progress = baton("eagle3", *options)
    assert (status, shown) == (1, "")
    assert message in progress.replace("\n", " ")
    assert "collecting" not in progress


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tokens", "0"),
        ("--batch", "0"),
        ("--max-answer-tokens", "3"),
        ("--self-prompts", "2"),
        ("--device", "tpu"),
        ("--dtype", "int8"),
        ("--draft-vocab", "0"),
    ],
)
def test_a_field_value_out_of_range_is_a_usage_error(baton: Baton, option: str, value: str) -> None:
    status, shown, progress = baton("eagle3", option, value)
    assert (status, shown) == (2, "")
    assert f"Invalid value for '{option}'" in progress


def test_unrelated_files_are_not_overwritten(baton: Baton, home: Path) -> None:
    before = (home / "tiny" / "model.safetensors").read_bytes()
    status, _, progress = baton("draft", "--out", str(home / "tiny"))
    assert status == 1
    assert "has files that were not written by a training run" in progress
    assert (home / "tiny" / "model.safetensors").read_bytes() == before


def _stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_another_kind_is_not_replaced(baton: Baton, kind: str) -> None:
    """Even where a training wrote it; refused before the target is looked for."""
    what = {"eagle3": "an EAGLE-3 head", "medusa": "Medusa heads", "draft": "a language model"}
    assert baton(kind, "--out", "there", "--epochs", "1", *KINDS[kind][1])[0] == 0
    before = _stored(Path("there"))
    for other in KINDS.keys() - {kind}:
        status, _, progress = baton(other, "--out", "there", "--model", "nobody/has-such-a-model")
        assert status == 1
        assert f"--out: there holds {what[kind]}, which `baton train {other}` would replace" in progress
        assert "Give an empty folder with --out" in progress
    assert _stored(Path("there")) == before
    assert baton(kind, "--out", "there", "--epochs", "1", *KINDS[kind][1])[0] == 0


@pytest.mark.parametrize("log", [None, "{}", "[]", "{"])
def test_an_unrelated_head_is_not_replaced(baton: Baton, log: str | None) -> None:
    folder = tiny_eagle3().write(Path("there"))
    if log is not None:
        (folder / "training_log.json").write_text(log)
    before = _stored(folder)
    for kind in KINDS:
        status, _, progress = baton(kind, "--out", "there", "--model", "nobody/has-such-a-model")
        assert status == 1
        assert (
            "there has files that were not written by a training run (it has no training_log.json), "
            "including an EAGLE-3 head" in (progress)
        )
    assert _stored(folder) == before


def test_an_unrelated_head_beside_a_log_is_not_replaced(baton: Baton) -> None:
    assert baton("medusa", "--out", "there", "--epochs", "1", "--draft-vocab", "64")[0] == 0
    tiny_eagle3().write(Path("there"))
    status, _, progress = baton("medusa", "--out", "there", "--draft-vocab", "64")
    assert status == 1
    assert "there holds an EAGLE-3 head" in progress


def test_answers_to_other_prompts_are_not_mixed(baton: Baton, tmp_path: Path) -> None:
    (tmp_path / "others.jsonl").write_text('{"prompt": "hello world, the fox"}\n', encoding="utf-8")
    assert baton("medusa", "--work", "work", "--draft-vocab", "64")[0] == 0
    status, _, progress = baton("medusa", "--work", "work", "--prompts", "others.jsonl")
    assert status == 1
    assert "was collected with other options: --prompts has changed. Give the same options" in progress
    status, _, progress = baton("medusa", "--work", "work", "--seed", "5", "--max-answer-tokens", "12")
    assert status == 1
    assert "with other options: --max-answer-tokens is 12 and was 16; --seed is 5 and was 0. Give" in progress


def test_a_run_is_not_resumed_with_other_options(baton: Baton) -> None:
    """The message uses the names of the command line."""
    options = ("--work", "work", "--draft-vocab", "64", "--epochs", "1")
    assert baton("medusa", *options)[0] == 0
    status, _, progress = baton("medusa", *options[:4], "--heads", "2", "--no-train-lm-head", "--epochs", "3")
    assert status == 1
    assert (
        "work/medusa/training_state.pt belongs to a run with other options: --epochs is 3 and was 1; --heads is 2 and "
        "was 4; --train-lm-head is off and was on. Give the same options to resume it, name another folder with "
        "--work, or delete the file to start from the beginning."
    ) in progress
    status, _, progress = baton("medusa", *options, "--tokens", "1900")
    assert status == 1
    assert "with other options: the answers have changed, for example through a higher --tokens. Give" in progress


def test_a_head_that_is_trained_further_keeps_its_shape(baton: Baton) -> None:
    status, _, progress = baton("eagle3", "--from", "auto", "--kv-heads", "2")
    assert status != 0
    assert "--kv-heads cannot be chosen with --from" in progress


def test_a_head_of_another_target_cannot_be_trained_further(baton: Baton) -> None:
    status, _, progress = baton("eagle3", "--from", "auto")
    assert status != 0
    assert "vocabulary of 49152 tokens, but the target has 331" in progress


def test_the_card_names_no_folder_of_this_machine() -> None:
    files = [Path("/data/set/a.jsonl"), Path("own/b.jsonl")]
    options = MedusaOptions(prompts=files, work=Path("/data/work"), out=Path("/data/heads"))
    command = "baton train medusa --prompts /data/set/a.jsonl --prompts own/b.jsonl --work /data/work --out /data/heads"
    short = "baton train medusa --prompts a.jsonl --prompts own/b.jsonl --work work --out heads"
    assert _for_others(command, options) == short
