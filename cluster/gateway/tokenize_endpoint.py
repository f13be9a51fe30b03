"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from fastapi import Request, Response

from baton.core.errors import InvalidRequestError
from baton.core.request import check_token_ids
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.bodies import BodyReader
from cluster.gateway.http_edge import JsonResponse
from cluster.gateway.openai.json_body import whole
from cluster.gateway.openai.plan import chat_of, check_model
from cluster.gateway.openai.prompt_encoder import Chat, PromptEncoder
from cluster.gateway.openai.schemas import ChatCompletionRequest, parse_request
from cluster.gateway.openai.tokenize_schemas import (
    DetokenizeRequest,
    TokenizeChatRequest,
    parse_strictly,
    parse_tokenize,
)
from cluster.gateway.openai.tool_use import resolve_tools
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import Generator


class TokenizeEndpoint:
    """Serves both endpoints. What they get may be longer than the context."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        bodies: BodyReader,
        threads: WorkThreads,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._bodies = bodies
        self._threads = threads

    async def tokenize(self, request: Request) -> Response:
        body, card = await self._bodies.read_object(request), self._generator.model
        parsed = parse_tokenize(body)
        if isinstance(parsed, TokenizeChatRequest):
            chat = self._chat(parsed)
            check_model(parsed.model, card)
            token_ids = await self._encoder.encode_chat(chat, card, may_be_long=True)
        else:
            check_model(parsed.model, card)
            encoded = await self._encoder.encode_prompts(
                [parsed.prompt], card, parsed.add_special_tokens, may_be_long=True
            )
            token_ids = encoded[0][0]
        texts = None
        if parsed.return_token_strs:
            texts = await self._threads.run(len(token_ids), list, map(self._tokenizer.token_text, token_ids))
        answer = {"count": len(token_ids), "max_model_len": card.max_model_len, "tokens": token_ids}
        return JsonResponse({**answer, "token_strs": texts})

    def _chat(self, request: TokenizeChatRequest) -> Chat:
        """The chat whose completion would have these settings; errors as for a completion."""
        given = {
            name: getattr(request, name)
            for name in request.model_fields_set & ChatCompletionRequest.model_fields.keys()
        }
        chat = parse_request(ChatCompletionRequest, given)
        return chat_of(chat, resolve_tools(chat, is_allowed=self._encoder.dialect.allows_tools))

    async def detokenize(self, request: Request) -> Response:
        body, card = await self._bodies.read_object(request), self._generator.model
        parsed = parse_strictly(DetokenizeRequest, body)
        check_model(parsed.model, card)
        tokens = whole(parsed.tokens)
        if not set(map(type, tokens)) <= {int}:  # a bool is an int for isinstance()
            raise InvalidRequestError("tokens must be an array of token ids.", param="tokens")
        check_token_ids(tokens, card.vocab_size, "tokens")
        text = await self._threads.run(len(tokens), self._tokenizer.decode, tokens, skip_special_tokens=False)
        return JsonResponse({"prompt": text})
