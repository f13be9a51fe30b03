"""TLS of the endpoint: its configuration, and the check of certificate and key."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from baton.core.config_section import NonEmptyString, Section
from baton.core.errors import ConfigError


class TlsConfig(Section):
    """Files in PEM format; relative to the configuration's folder."""

    certificate: NonEmptyString
    """The certificate, followed by those of its issuers if clients lack them."""
    key: NonEmptyString
    """Its private key, without a password."""


def create_tls_context(config: TlsConfig) -> ssl.SSLContext:
    """A server's context with TLS 1.2 or newer.

    Raises:
        ConfigError: a file cannot be read, the certificate is not valid today, or the key does not belong to it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Makes new connections of ``context`` use the files' present content. Raises as :func:`create_tls_context`."""
    _check_dates(config.certificate, _read("certificate", config.certificate))
    _read("key", config.key)
    try:
        context.load_cert_chain(config.certificate, config.key, password=lambda: _refuse_password(config.key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"router.tls: the key {config.key} does not belong to the certificate {config.certificate}. Name the "
                "two files that were made together."
            ) from error
        raise ConfigError(
            f"router.tls.key: {config.key} is not a private key in PEM format; expected a file that begins with "
            "`-----BEGIN PRIVATE KEY-----` or similar."
        ) from error


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"router.tls.{name}: cannot read {path} ({error.strerror}). Name a file that the user of `baton up` may "
            "read."
        ) from error


def _check_dates(path: str, content: bytes) -> None:
    from cryptography import x509  # takes a tenth of a second, and most processes do not need it

    try:
        certificate = x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ConfigError(
            f"router.tls.certificate: {path} is not a certificate in PEM format; expected a file that begins with "
            "`-----BEGIN CERTIFICATE-----`."
        ) from error
    now, end, begin = datetime.now(UTC), certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if now > end:
        raise ConfigError(f"router.tls.certificate: {path} has expired on {end:%Y-%m-%d}. Renew it.")
    if now < begin:
        raise ConfigError(
            f"router.tls.certificate: {path} is valid from {begin:%Y-%m-%d %H:%M} UTC on. Check this machine's clock, "
            "or use another certificate."
        )


def _refuse_password(path: str) -> str:
    raise ConfigError(
        f"router.tls.key: {path} is encrypted with a password. Decrypt it with `openssl pkey -in FILE -out NEW_FILE`, "
        "and make the new file readable for you only."
    )
