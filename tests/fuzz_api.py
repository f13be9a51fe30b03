"""Sends requests made from ``/openapi.json`` to a router over simulated workers: ``python -m tests.fuzz_api [--help]``.

Half of the cases follow the document, the others break it somewhere. None may get a status of 500 or above, hang, or
get an answer that the document does not describe.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from benchmarks.router_load.processes import router_under_test
from benchmarks.router_load.setup import Workers
from tests.tiny_tokenizers import write_model_folder

_CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
_ONE_OF = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "regex", "ebnf", "tools", "tool_choice", "text", "reasoning", "include", "thinking", "output_config",
}  # fmt: skip
"""Kept in every fourth request: a request with several of them, or with a wrong one, is refused for that alone."""
_ENDLESS = "/admin/live"
"""Ends after as many events as the request asks for, two seconds each."""
_TIMEOUT_S = 30.0
_LIMITS = {"max_model_len": 256, "router": {"max_inflight": 16}}


def fuzz(endpoint: str, num_cases: int, under: str = "/", seed: int = 0) -> Counter[str]:
    """Sends about so many requests, as many of each kind to each operation that takes input.

    Args:
        under: only operations whose path begins like this.
        seed: determines the requests.

    Returns:
        The number of requests by operation and status.

    Raises:
        AssertionError: an answer is not as it must be; the text has the request.
    """
    schema = schemathesis.openapi.from_url(f"{endpoint}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path.startswith(under)]
    with_input = [found for found in operations if found.body or found.path_parameters or found.query]
    counts: Counter[str] = Counter()
    with requests.Session() as session:
        for operation in operations:
            modes = list(GenerationMode) if operation in with_input else [GenerationMode.POSITIVE]
            num_each = num_cases // (len(GenerationMode) * len(with_input)) if operation in with_input else 1
            for mode in modes:

                @seeded(seed)
                @settings(
                    max_examples=num_each,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def send(case: schemathesis.Case) -> None:
                    if isinstance(case.body, dict) and counts.total() % 4:
                        for name in _ONE_OF & case.body.keys():  # the document cannot say that they exclude each other
                            del case.body[name]
                    if case.operation.path == _ENDLESS and str(case.query.get("snapshots", 1)).isdigit():
                        case.query["snapshots"] = 1
                    answer = case.call(session=session, timeout=_TIMEOUT_S)
                    counts[f"{case.method} {case.operation.path} {answer.status_code}"] += 1
                    case.validate_response(answer, checks=_CHECKS)

                with contextlib.suppress(Unsatisfiable):  # some inputs cannot break the document
                    send()
    return counts


async def fuzz_simulated(num_cases: int, under: str = "/", seed: int = 0) -> Counter[str]:
    """Like :func:`fuzz`, with a router and workers of its own."""
    with TemporaryDirectory(prefix="baton-fuzz-") as folder:
        model = write_model_folder(Path(folder) / "tiny")
        async with router_under_test(Workers(), {**_LIMITS, "model": str(model)}) as target:
            return await asyncio.to_thread(fuzz, target.endpoint, num_cases, under, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="number of requests, about")
    parser.add_argument("--under", default="/", metavar="PATH", help="only operations whose path begins like this")
    parser.add_argument("--seed", type=int, default=0, help="determines the requests")
    options = parser.parse_args()
    counts = asyncio.run(fuzz_simulated(options.cases, options.under, options.seed))
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:6} {name}\n")
    sys.stdout.write(f"{counts.total():6} in all\n")


if __name__ == "__main__":
    main()
