"""OpenAI's Responses API."""

from __future__ import annotations

from cluster.gateway.chat_api import ChatApi
from cluster.gateway.responses.answer import ResponsesAnswer
from cluster.gateway.responses.schemas import ResponsesRequest
from cluster.gateway.responses.translation import NAMES, to_chat

RESPONSES_API = ChatApi(ResponsesRequest, to_chat, ResponsesAnswer, NAMES)
