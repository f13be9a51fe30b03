"""A form with a file (multipart/form-data), read piece by piece. The file's content is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from baton.core.errors import InvalidRequestError, UnsupportedMediaTypeError

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 255


class FileBegins:
    """The file of the form begins. ``filename`` is as the client sent it, without control characters and folders."""

    def __init__(self, filename: str) -> None:
        self.filename = filename


Piece = FileBegins | bytes
"""The begin of the file, or some of its content."""


class FormReader:
    """
    Args:
        content_type: the request's header.
        file_field: name of the field that holds the file.

    Attributes:
        fields: the other fields that have arrived, as text.

    Raises:
        UnsupportedMediaTypeError: the request is not such a form.
    """

    def __init__(self, content_type: str | None, file_field: str) -> None:
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if media_type != b"multipart/form-data" or not boundary:
            found = "is missing" if content_type is None else f"is {content_type[:60]!r}"
            raise UnsupportedMediaTypeError(
                f"Content-Type {found} and must be multipart/form-data with a boundary. With curl, send the file with "
                "-F purpose=batch -F file=@requests.jsonl."
            )
        self.fields: dict[str, str] = {}
        self.is_complete = False
        self._file_field = file_field
        self._pieces: list[Piece] = []
        self._header_name = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        self._value = b""
        self._num_files = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_field,
                "on_header_value": self._header_text,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_end": self._form_ends,
            },
        )

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces of the file in ``data``, the next part of the body.

        Raises:
            InvalidRequestError: it is not a form, or has too many or too long fields.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError("The body is not a valid multipart form.") from error
        pieces, self._pieces = self._pieces, []
        yield from pieces

    def _part_begins(self) -> None:
        self._headers, self._field, self._value = {}, None, b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_text(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        if len(self._header_value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(f"A header of the form has more than {_MAX_FIELD_BYTES} bytes.")

    def _header_ends(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace")
        if name == self._file_field:
            self._num_files += 1
            if self._num_files > 1:
                raise InvalidRequestError("The form has several files; send one.", param=name)
            self._pieces.append(FileBegins(_plain_name(options.get(b"filename", b""))))
            return
        if len(self.fields) == _MAX_FIELDS or name in self.fields:
            raise InvalidRequestError(f"The form has too many fields, or {name[:40]!r} twice.", param=name[:40])
        self._field = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"The field {self._field[:40]!r} has more than {_MAX_FIELD_BYTES} bytes.", param=self._field[:40]
            )

    def _part_ends(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _form_ends(self) -> None:
        self.is_complete = True


def _plain_name(raw: bytes) -> str:
    name = "".join(char for char in raw.decode(errors="replace") if char.isprintable())
    return name.replace("\\", "/").rpartition("/")[2][:_MAX_NAME_CHARS] or "file"
