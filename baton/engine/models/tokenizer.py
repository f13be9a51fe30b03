"""Text to token ids and back: encoding, chat templates, incremental detokenization. No torch here."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError, InvalidRequestError
from baton.engine.models.detokenizer import (
    NUM_CONTEXT_TOKENS,
    ByteLevelStrategy,
    IncrementalDetokenizer,
    Strategy,
    WindowStrategy,
)

_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2, section 2.2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A transformers tokenizer, reduced to the operations that serving needs.

    Thread-safe: the wrapped tokenizer does not change after construction.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wraps ``hf_tokenizer``, a ``transformers.PreTrainedTokenizerBase``."""
        self._hf = hf_tokenizer
        self._backend: Any = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._is_byte_level = False
        if self._backend is not None:
            from tokenizers import decoders

            # Some tokenizer.json files carry a truncation length, which would cut prompts silently.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        added = hf_tokenizer.added_tokens_decoder
        self._added_text: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(hf_tokenizer.all_special_ids) | {
            token_id for token_id, token in added.items() if token.special
        }
        self._added_ids = {text: token_id for token_id, text in self._added_text.items()}
        self._alphabet = _byte_level_alphabet()
        self._vocab_size = len(hf_tokenizer)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, *, only_local: bool = False) -> Tokenizer:
        """Loads the tokenizer in the folder ``path`` (or that a hub id names).

        Args:
            only_local: for a hub id, use only files of this machine and do not ask the hub.

        Raises:
            ConfigError: there is no usable tokenizer.
        """
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(str(path), local_files_only=only_local, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises it as such
            text = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"model: {path} has no usable tokenizer ({text}). Expected tokenizer.json beside its config.json."
            ) from error
        return cls(found)

    def save(self, folder: Path) -> None:
        """Writes the files from which :meth:`load` builds the same tokenizer."""
        self._hf.save_pretrained(str(folder))

    @property
    def vocab_size(self) -> int:
        """Number of tokens including added ones; a model's embedding may have more rows."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    def to_json(self) -> str:
        """The content of a ``tokenizer.json``; empty for a tokenizer without one."""
        return "" if self._backend is None else str(self._backend.to_str())

    def equals(self, other: Tokenizer) -> bool:
        """Whether both turn the same text, chats included, into the same tokens and back."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        vocabulary = self._hf.get_vocab() if self._backend is None else self._backend.to_str()
        return vocabulary, self._hf.chat_template, self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def tool_chat_template(self) -> str:
        """Source of the chat template for conversations with tools; empty if there is none."""
        found = self._hf.chat_template
        if isinstance(found, Mapping):
            found = found.get("tool_use") or found.get("default")
        return found or ""

    @property
    def response_template(self) -> Any:
        """How transformers parses the model's output; ``None`` if the tokenizer does not say."""
        return getattr(self._hf, "response_template", None)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest vocabulary entry; bounds a text's number of tokens from below."""
        return max((len(token) for token in self._hf.get_vocab()), default=1)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def added_id(self, text: str) -> int | None:
        """Id of the added token that is written as ``text``; it may be special or not."""
        return self._added_ids.get(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds those of the model's own post-processor (often BOS).

        Raises:
            InvalidRequestError: the text has lone surrogates, which no encoding can represent.
        """
        _check_encodable(text)
        if self._backend is not None:
            # Unlike encode(), it lets other threads run meanwhile, and skips offsets, which nothing needs.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            token_ids: list[int] = encoded.ids
            return token_ids
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders ``messages`` and ``tools`` with the model's chat template.

        Raises:
            InvalidRequestError: there is no chat template, it refuses these messages, or ``template_kwargs`` names an
                argument that is not the template's own.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions with a prompt instead.", param="messages"
            )
        kwargs = dict(template_kwargs or {})
        if clash := sorted(_reserved_template_kwargs(self._hf.apply_chat_template) & kwargs.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs must only contain the template's own variables; {clash[0]!r} is not one. "
                "Remove it.",
                param="chat_template_kwargs",
            )
        try:
            text: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        # Templates are programs run on the client's values; Jinja passes these errors on.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"The model's chat template does not accept these messages: {str(error)[:300]}", param="messages"
            ) from error
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat. Templates write their own special tokens, so none are added by default.

        Raises:
            InvalidRequestError: see :meth:`render_chat`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_pieces(self, pieces: Sequence[str | Sequence[int]], add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text in which some pieces are encoded already."""
        token_ids = self.encode("", add_special_tokens) if add_special_tokens else []
        for piece in pieces:
            token_ids += self.encode(piece, add_special_tokens=False) if isinstance(piece, str) else piece
        return token_ids

    @cached_property
    def special_tokens_as_text(self) -> dict[str, list[int]]:
        """How each special token is encoded where it is ordinary text.

        Raises:
            ConfigError: the tokenizer has no tokenizer.json, so that it cannot tell.
        """
        if self._backend is None:
            raise ConfigError(
                "router.special_tokens_in_content is text, which needs a model with tokenizer.json; set it to parse"
            )
        backend = copy.deepcopy(self._backend)  # the setting is the whole tokenizer's
        backend.encode_special_tokens = True
        texts = filter(None, map(self.token_text, sorted(self._special_ids)))
        return {text: backend.encode(text, add_special_tokens=False).ids for text in texts}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids outside the vocabulary are left out."""
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        return str(self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, which may be a part of a character; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._find_bytes(token_id)
            if 0 <= token_id < self.vocab_size:  # do not cache unknown ids, of which there may be many
                self._bytes[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        token: str | None = self._hf.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._is_byte_level:
            if all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if match := _BYTE_FALLBACK_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if _SENTENCEPIECE_SPACE in token:
            # Decoding it alone would lose the leading space.
            return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        shown_token_ids: Collection[int] = (),
    ) -> IncrementalDetokenizer:
        """Creates a detokenizer for one sequence.

        Args:
            prompt_token_ids: the tokens before the output: sentencepiece-like vocabularies keep the leading space of
                the first token only when something comes before it.
            shown_token_ids: special tokens that are not skipped.
        """
        strategy: Strategy
        if self._is_byte_level:
            strategy = ByteLevelStrategy(self.token_bytes)
        else:
            visible = [token for token in prompt_token_ids if not (skip_special_tokens and self.is_special(token))]
            strategy = WindowStrategy(
                lambda token_ids: self.decode(token_ids, skip_special_tokens=False), visible[-NUM_CONTEXT_TOKENS:]
            )
        hidden = self._special_ids.difference(shown_token_ids) if skip_special_tokens else frozenset[int]()
        return IncrementalDetokenizer(strategy, hidden)


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send valid Unicode."
        ) from error


def _reserved_template_kwargs(apply_chat_template: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(apply_chat_template).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return named | {"messages"}
