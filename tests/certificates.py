"""Self-signed certificates for tests."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Files:
    certificate: Path
    key: Path

    @property
    def config(self) -> dict[str, str]:
        return {"certificate": str(self.certificate), "key": str(self.key)}


def self_signed(
    folder: Path,
    name: str = "localhost",
    *,
    begins: timedelta = timedelta(days=-1),
    days: int = 2,
    password: bytes = b"",
) -> Files:
    """Writes a certificate for ``name``, and 127.0.0.1 for localhost, valid for two days from now plus ``begins``."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.now(UTC) + begins
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names if name == "localhost" else names[:1]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    files = Files(folder / "endpoint.pem", folder / "endpoint.key")
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pkcs8 = serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, encryption))
    return files
