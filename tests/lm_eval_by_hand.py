"""lm_eval's own ``local-completions`` against a running endpoint, on examples that need no data from a hub.

lm_eval is no dependency of the project, so it gets an environment of its own, which finds torch and transformers in the
project's:

    python -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install "lm_eval[api]"
    .venv/bin/python -c "import site; print(site.getsitepackages()[0])" \\
        > "$(/tmp/lm-eval/bin/python -c 'import site; print(site.getsitepackages()[0])')/project.pth"
    baton up --detach
    HF_HUB_OFFLINE=1 /tmp/lm-eval/bin/python -m tests.lm_eval_by_hand http://127.0.0.1:8000 MODEL_FOLDER

It chooses the likeliest ending of each beginning, as hellaswag does, and compares every log-likelihood, and whether the
ending is what greedy decoding gives, with transformers in float32. It exits with 1 if one differs by more than
``--tolerance`` per token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoTokenizer

from tests.scored_prompts import load_reference, log_softmax_of

EXAMPLES = (
    ("The capital of France is", (" Paris.", " a banana.", " seven o'clock.", " swimming.")),
    ("Water freezes at zero degrees", (" Celsius.", " marriage.", " guitar.", " of the spoon.")),
    ("She opened her umbrella because it was", (" raining.", " delicious.", " an airport.", " seventeen.")),
    ("The dog wagged its", (" tail.", " window.", " newspaper.", " mountain.")),
    ("Two plus two equals", (" four.", " a river.", " yesterday.", " of cheese.")),
    ("He put on his shoes and went", (" for a walk.", " to be purple.", " the arithmetic.", " into a comma.")),
    ("At night we can see the moon and the", (" stars.", " sandwiches.", " invoice.", " carpets.")),
    ("The baker took the bread out of the", (" oven.", " ocean.", " argument.", " holiday.")),
    ("Once upon a time there was a little", (" girl who lived in a village.", " of.", " the the.", " tax code.")),
    ("To read a book, you first have to", (" open it.", " boil it.", " sell the sky.", " it it it.")),
)


def loglikelihoods(base_url: str, folder: Path, batch_size: int) -> list[tuple[float, bool]]:
    """What lm_eval finds for all endings, in their order."""
    model = LocalCompletionsAPI(
        base_url=f"{base_url}/v1/completions",
        model=folder.name,
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        batch_size=batch_size,
    )
    model.model = None  # the endpoint's own
    pairs = [(context, ending) for context, endings in EXAMPLES for ending in endings]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found: list[tuple[float, bool]] = model.loglikelihood(requests, disable_tqdm=True)
    return found


def reference(folder: Path) -> list[tuple[float, bool, int]]:
    """Log-likelihood, greediness and number of tokens of each ending, by transformers."""
    model, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for context, endings in EXAMPLES:
        for ending in endings:
            tokens = tokenizer.encode(context + ending)
            start = len(tokenizer.encode(context))
            expected = log_softmax_of(model, tokens)[start - 1 :]
            own = [float(row[token]) for row, token in zip(expected, tokens[start:], strict=True)]
            is_greedy = expected.argmax(dim=-1).tolist() == tokens[start:]
            found.append((sum(own), is_greedy, len(own)))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("folder", type=Path, help="the served model, for its tokenizer and for transformers")
    parser.add_argument("--tolerance", type=float, default=0.001, help="0.1 or so for a cluster in bfloat16")
    options = parser.parse_args(arguments)
    expected = reference(options.folder)
    is_right = True
    for batch_size in (1, 8):
        found = loglikelihoods(options.base_url, options.folder, batch_size)
        worst = max(abs(own[0] - other[0]) / other[2] for own, other in zip(found, expected, strict=True))
        num_equal = sum(own[1] == other[1] for own, other in zip(found, expected, strict=True))
        places = iter(found)
        best = [max(range(len(endings)), key=[next(places)[0] for _ in endings].__getitem__) for _, endings in EXAMPLES]
        sys.stdout.write(
            f"batches of {batch_size}: {best.count(0)} of {len(best)} endings right, log-likelihoods within "
            f"{worst:.6f} per token of transformers, {num_equal} of {len(found)} agree on what is greedy\n"
        )
        is_right = is_right and worst <= options.tolerance and num_equal == len(found)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
