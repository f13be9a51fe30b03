"""Other clients against a running cluster, each with a chat, a stream, a required call and a parsed answer.

They pin packages of their own, so they have an environment of their own:

    python -m venv build/clients
    build/clients/bin/pip install langchain-openai langchain-anthropic litellm instructor
    build/clients/bin/python tests/clients_by_hand.py http://127.0.0.1:8000 smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": CITY},
}


class Captain(BaseModel):
    """A captain of a ship."""

    name: str = Field(max_length=20)
    rank: Literal["captain", "admiral"]


def check(condition: bool, found: object) -> None:
    if not condition:
        raise AssertionError(f"got {found!r}")


def langchain_openai(endpoint: str, model: str, *, responses: bool) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{endpoint}/v1", api_key="none", model=model, temperature=0, max_tokens=60,
        use_responses_api=responses, max_retries=0,
    )  # type: ignore[call-arg, arg-type, unused-ignore]  # fmt: skip
    check("Paris" in chat.invoke(QUESTION).text, chat.invoke(QUESTION))
    check("Paris" in "".join(chunk.text for chunk in chat.stream(QUESTION)), "a stream")
    message = chat.bind_tools([TOOL], tool_choice="required").invoke("What is the weather in Oslo?")
    check(message.tool_calls[0]["args"]["city"] in ("Oslo", "Rome"), message.tool_calls)
    captain = chat.with_structured_output(Captain, method="json_schema").invoke("Invent a captain.")
    check(isinstance(captain, Captain), captain)


def langchain_anthropic(endpoint: str, model: str) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(base_url=endpoint, api_key="none", model=model, max_tokens=60, max_retries=0)  # type: ignore[call-arg, arg-type, unused-ignore]
    check(bool(chat.invoke(QUESTION).text), "no text")
    check(bool("".join(chunk.text for chunk in chat.stream(QUESTION))), "no stream")
    message = chat.bind_tools([TOOL], tool_choice="any").invoke("What is the weather in Oslo?")
    check(message.tool_calls[0]["args"]["city"] in ("Oslo", "Rome"), message.tool_calls)
    captain = chat.with_structured_output(Captain).invoke("Invent a captain.")
    check(isinstance(captain, Captain), captain)


def litellm_chat(endpoint: str, model: str) -> None:
    import litellm

    fields: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": f"{endpoint}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    answer = litellm.completion(messages=MESSAGES, **fields)
    check("Paris" in answer.choices[0].message.content, answer)
    chunks = litellm.completion(messages=MESSAGES, stream=True, **fields)
    check("Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks), "a stream")
    answer = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **fields)
    check("city" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments), answer)
    answer = litellm.completion(messages=MESSAGES, response_format=Captain, **fields)
    Captain.model_validate_json(answer.choices[0].message.content)


def litellm_responses(endpoint: str, model: str) -> None:
    import litellm

    fields: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{endpoint}/v1", "api_key": "none"}
    answer = litellm.responses(input=QUESTION, temperature=0, max_output_tokens=60, **fields)
    check("Paris" in answer.output[0].content[0].text, answer)
    events = litellm.responses(input=QUESTION, temperature=0, max_output_tokens=60, stream=True, **fields)
    check("Paris" in "".join(getattr(event, "delta", "") or "" for event in events), "a stream")


def litellm_anthropic(endpoint: str, model: str) -> None:
    import litellm

    fields: dict[str, Any] = {"model": f"anthropic/{model}", "api_base": endpoint, "api_key": "none", "max_tokens": 60}
    answer = litellm.completion(messages=MESSAGES, **fields)
    check(bool(answer.choices[0].message.content), answer)
    chunks = litellm.completion(messages=MESSAGES, stream=True, **fields)
    check(bool("".join(chunk.choices[0].delta.content or "" for chunk in chunks)), "a stream")
    answer = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **fields)
    check("city" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments), answer)


def instructor_modes(endpoint: str, model: str) -> None:
    import instructor
    from openai import OpenAI

    openai = OpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai, mode=mode)
        captain = client.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Captain, temperature=0, max_tokens=100, max_retries=1
        )
        check(isinstance(captain, Captain), captain)


CHECKS: dict[str, Callable[[str, str], None]] = {
    "langchain-openai, chat": lambda endpoint, model: langchain_openai(endpoint, model, responses=False),
    "langchain-openai, responses": lambda endpoint, model: langchain_openai(endpoint, model, responses=True),
    "langchain-anthropic": langchain_anthropic,
    "litellm, chat": litellm_chat,
    "litellm, responses": litellm_responses,
    "litellm, anthropic": litellm_anthropic,
    "instructor": instructor_modes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("model")
    arguments = parser.parse_args()
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # instead of a download
    num_failed = 0
    for name, run in CHECKS.items():
        try:
            run(arguments.endpoint, arguments.model)
            result = "ok"
        except Exception:  # noqa: BLE001 (each client fails in ways of its own)
            result, num_failed = traceback.format_exc(limit=-2).strip(), num_failed + 1
        sys.stdout.write(f"{name}: {result}\n")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
