"""Ray's token, which every process of a Ray cluster sends to every other one.

It is where Ray looks for it: in ``RAY_AUTH_TOKEN``, in the file that ``RAY_AUTH_TOKEN_PATH`` names, or in
``~/.ray/auth_token``. baton makes the file readable by its owner only.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from baton.core.errors import ConfigError

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
FILE_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32
_HELP = "`baton node token` prints it on the head"


def token_file() -> Path:
    """The file of the token, which may not exist."""
    chosen = os.environ.get(FILE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".ray" / "auth_token"


def find_token() -> str | None:
    """The token, or ``None`` if there is none.

    Raises:
        ConfigError: the file is empty or cannot be read.
    """
    if given := os.environ.get(TOKEN_VARIABLE, "").strip():  # Ray's precedence
        return given
    file = token_file()
    try:
        token = file.read_text(encoding="utf-8").strip()
        status = file.stat()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Ray's token cannot be read from {file}: {error}.") from error
    if not token:
        raise ConfigError(f"Ray's token file {file} is empty. Write the head's token into it; {_HELP}.")
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():  # Ray itself makes the file readable for everybody
        file.chmod(0o600)
    return token


def ensure_token() -> str:
    """The token; makes a new one if there is none.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    if token := find_token():
        return token
    file = token_file()
    token = secrets.token_hex(_TOKEN_BYTES)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Complete under its final name, since another process, even of another machine, may be making one.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(token)
            with suppress(FileExistsError):
                os.link(temporary, file)
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise ConfigError(
            f"Ray's token cannot be written to {file}: {error}. Set {FILE_VARIABLE} to a file that can be written."
        ) from error
    return find_token() or token


def require_token() -> str:
    """The token, if it was given to this machine before.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if token := find_token():
        return token
    raise ConfigError(
        f"This machine has no token of the Ray cluster: {token_file()} does not exist. {_HELP.capitalize()}; write it "
        "into that file, or name another file with --token-file."
    )


def refuse_open_ray() -> None:
    """Raises :class:`ConfigError` if the environment switches Ray's token authentication off."""
    mode = os.environ.get(MODE_VARIABLE, "token")
    if mode.lower() != "token":
        raise ConfigError(
            f"{MODE_VARIABLE} is {mode!r}, so Ray would run the code of anyone who reaches its ports. Unset "
            f"{MODE_VARIABLE}, or set it to token."
        )


def use_token() -> None:
    """Lets the Ray of this process and of its children send and ask for the token."""
    os.environ[MODE_VARIABLE] = "token"
    raylet = sys.modules.get("ray._raylet")  # it has read the environment when it was imported
    if raylet is not None:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
