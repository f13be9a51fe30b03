"""Certificates of nodes for mutual TLS: reading, checking and creating them.

All certificates of a cluster are issued by one authority, which issues nothing else, and carry the same name
:data:`CLUSTER_NAME`. To be a member means to have such a certificate, so processes do not compare addresses.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.core.errors import ConfigError

CLUSTER_NAME = "baton.cluster"
_CLOCK_TOLERANCE = datetime.timedelta(days=1)
"""New certificates are valid from this long ago, because the clocks of nodes differ, some by a time zone."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM data of one node.

    Attributes:
        authority: certificate of the authority that issued all of the cluster's certificates.
        certificate: the node's certificate.
        key: the node's private key.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Certificates(...)"  # keeps the key out of logs and tracebacks

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """What a server shows, and by what it knows its clients."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authority)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def read_certificates(authority: Path, certificate: Path, key: Path) -> Certificates:
    """Reads and checks the files of this node.

    Raises:
        ConfigError: a file cannot be read, or does not fit the others; the message names it.
    """
    found = Certificates(_read("ca", authority), _read("certificate", certificate), _read("key", key))
    root = _parse("ca", authority, found.authority)
    own = _parse("certificate", certificate, found.certificate)
    try:
        private = serialization.load_pem_private_key(found.key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"security.key: {key} is not a PEM private key without a password: {error}") from error
    if private.public_key() != own.public_key():
        raise ConfigError(f"security.key: {key} does not belong to the certificate {certificate}.")
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(f"security.certificate: {certificate} was not issued by {authority}.") from error
    _check_validity("ca", authority, root)
    _check_validity("certificate", certificate, own)
    if CLUSTER_NAME not in _names(own):
        raise ConfigError(
            f"security.certificate: {certificate} has no subject alternative name {CLUSTER_NAME}. "
            "Create one with `baton certs`, or add this DNS name to it."
        )
    return found


def create_authority(days: int) -> tuple[bytes, bytes]:
    """Creates an authority that is valid for ``days``. Returns its certificate and its key as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton cluster authority")])
    builder = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return _pem(builder.sign(key, hashes.SHA256())), _key_pem(key)


def issue_certificate(authority: bytes, authority_key: bytes, node: str, days: int) -> tuple[bytes, bytes]:
    """Issues the certificate of a node.

    Args:
        node: the node's name, for people.

    Returns:
        The certificate and its key as PEM.

    Raises:
        ValueError: the authority's data are not a certificate and its key.
    """
    root = x509.load_pem_x509_certificate(authority)
    root_key = serialization.load_pem_private_key(authority_key, password=None)
    if not isinstance(root_key, ec.EllipticCurvePrivateKey) or root_key.public_key() != root.public_key():
        raise ValueError("the key does not belong to the authority's certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    builder = (
        _builder(name, root.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CLUSTER_NAME)]), critical=False)
    )
    return _pem(builder.sign(root_key, hashes.SHA256())), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.{key}: {path} cannot be read on this node: {error.strerror}. "
            "Every node needs its own copy of these files; `baton certs` creates them."
        ) from error


def _parse(key: str, path: Path, data: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise ConfigError(f"security.{key}: {path} is not a PEM certificate: {error}") from error


def _check_validity(key: str, path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= now <= ends:
        raise ConfigError(
            f"security.{key}: {path} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now:%Y-%m-%d %H:%M} on this node. Renew it with `baton certs`, or correct the node's clock."
        )


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.DNSName)
