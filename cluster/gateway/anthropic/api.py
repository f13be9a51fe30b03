"""Anthropic's Messages API."""

from __future__ import annotations

from cluster.gateway.anthropic.answer import MessagesAnswer
from cluster.gateway.anthropic.schemas import MessagesRequest
from cluster.gateway.anthropic.translation import NAMES, to_chat
from cluster.gateway.anthropic.versions import check_version
from cluster.gateway.chat_api import ChatApi

MESSAGES_API = ChatApi(MessagesRequest, to_chat, MessagesAnswer, NAMES, check_version)
