"""Calls between processes: who is answered, and what is encrypted."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.core.errors import ConfigError, InvalidRequestError
from baton.rpc.certificates import Certificates, create_authority, issue_certificate, read_certificates
from baton.rpc.channel import PeerServer, create_channel, message_limit
from baton.rpc.credentials import ClusterSecret, PeerCredentials, create_secret
from baton.rpc.node_certificates import NodeCertificates
from tests.waiting import TIMEOUT_S

DAYS = 2


def certificates_of(authority: tuple[bytes, bytes], node: str = "node-1", days: int = DAYS) -> Certificates:
    return Certificates(authority[0], *issue_certificate(*authority, node, days))


def credentials_with(certificates: Certificates | None, secret: ClusterSecret) -> PeerCredentials:
    return PeerCredentials(secret, None if certificates is None else lambda: certificates)


@pytest.fixture(scope="module")
def authority() -> tuple[bytes, bytes]:
    return create_authority(DAYS)


@pytest.fixture(params=["plain", "encrypted"])
def credentials(request: pytest.FixtureRequest, authority: tuple[bytes, bytes]) -> PeerCredentials:
    secret = ClusterSecret(create_secret())
    return credentials_with(certificates_of(authority) if request.param == "encrypted" else None, secret)


@asynccontextmanager
async def serving(credentials: PeerCredentials, **options: int) -> AsyncIterator[str]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def echo_all(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = PeerServer(credentials, **options)
    methods = {
        "Call": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.stream_stream_rpc_method_handler(echo_all),
    }
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    address = server.bind("127.0.0.1")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=0)


async def call(
    address: str, credentials: PeerCredentials, metadata: tuple[tuple[str, str], ...] | None = None, data: bytes = b"x"
) -> str:
    """The status of a call: OK, or a gRPC code."""
    channel = create_channel(address, credentials)
    try:
        sent = credentials.call_metadata(address) if metadata is None else metadata
        assert await channel.unary_unary("/test.Service/Call")(data, metadata=sent, timeout=TIMEOUT_S) == data
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await channel.close()


async def test_members_are_answered(credentials: PeerCredentials) -> None:
    async with serving(credentials) as address:
        assert await call(address, credentials) == "OK"


async def test_calls_without_the_token_of_this_server_are_refused(credentials: PeerCredentials) -> None:
    other = PeerCredentials(ClusterSecret(create_secret()), credentials.certificates)
    async with serving(credentials) as address:
        elsewhere = credentials.call_metadata("127.0.0.1:1")
        for metadata in ((), (("baton-token", ""),), other.call_metadata(address), elsewhere):
            assert await call(address, credentials, metadata) == "UNAUTHENTICATED"


async def test_a_refused_stream_ends_before_it_sends_anything(credentials: PeerCredentials) -> None:
    async with serving(credentials) as address:
        channel = create_channel(address, credentials)
        stream = channel.stream_stream("/test.Service/Stream")(timeout=TIMEOUT_S)
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_unknown_methods_are_refused_like_known_ones(credentials: PeerCredentials) -> None:
    async with serving(credentials) as address:
        channel = create_channel(address, credentials)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Other")(b"", timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_messages_above_the_limit_are_refused(credentials: PeerCredentials) -> None:
    async with serving(credentials, max_message_bytes=message_limit(1000)) as address:
        assert await call(address, credentials, data=bytes(message_limit(1000) - 100)) == "OK"
        assert await call(address, credentials, data=bytes(message_limit(1000) + 100)) == "RESOURCE_EXHAUSTED"


async def test_only_certificates_of_the_authority_connect(authority: tuple[bytes, bytes]) -> None:
    secret = ClusterSecret(create_secret())
    member, stranger = certificates_of(authority), certificates_of(create_authority(DAYS))
    mixed = Certificates(member.authority, stranger.certificate, stranger.key)
    async with serving(credentials_with(member, secret)) as address:
        second_node = certificates_of(authority, "node-2")
        assert await call(address, credentials_with(second_node, secret)) == "OK"
        for outsider in (None, stranger, mixed):
            assert await call(address, credentials_with(outsider, secret)) == "UNAVAILABLE"


async def test_clients_refuse_servers_of_another_authority(authority: tuple[bytes, bytes]) -> None:
    secret = ClusterSecret(create_secret())
    async with serving(credentials_with(certificates_of(create_authority(DAYS)), secret)) as address:
        assert await call(address, credentials_with(certificates_of(authority), secret)) == "UNAVAILABLE"


async def test_an_encrypted_server_does_not_answer_plain_text(authority: tuple[bytes, bytes]) -> None:
    async with serving(credentials_with(certificates_of(authority), ClusterSecret(create_secret()))) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))
            answer = connection.recv(1000)
        assert answer[:1] in (b"", b"\x15")  # nothing, or a TLS alert


def test_proofs_hold_for_one_address_and_one_purpose() -> None:
    secret, other = ClusterSecret(create_secret()), ClusterSecret(create_secret())
    secret.check_peer("10.0.0.1:5000", secret.peer_proof("10.0.0.1:5000"))
    for proof in (
        "",
        secret.peer_proof("10.0.0.1:5001"),
        secret.call_token("10.0.0.1:5000"),
        other.peer_proof("10.0.0.1:5000"),
        "ü",
    ):
        with pytest.raises(InvalidRequestError, match="has not proved"):
            secret.check_peer("10.0.0.1:5000", proof)


def test_keys_do_not_show_in_texts(authority: tuple[bytes, bytes]) -> None:
    found = credentials_with(certificates_of(authority), ClusterSecret(b"\x01\x02"))
    assert "PRIVATE" not in repr(found)
    assert "x01" not in repr(found)


def write(folder: Path, authority: bytes, certificate: bytes, key: bytes) -> tuple[Path, Path, Path]:
    for name, data in (("ca.pem", authority), ("node.pem", certificate), ("node.key", key)):
        (folder / name).write_bytes(data)
    return folder / "ca.pem", folder / "node.pem", folder / "node.key"


def test_files_of_a_node_are_read(authority: tuple[bytes, bytes], tmp_path: Path) -> None:
    own = certificates_of(authority)
    assert read_certificates(*write(tmp_path, own.authority, own.certificate, own.key)) == own


def test_files_that_do_not_fit_are_named(authority: tuple[bytes, bytes], tmp_path: Path) -> None:
    own, other, foreign = (
        certificates_of(authority),
        certificates_of(authority),
        certificates_of(create_authority(DAYS)),
    )
    expired = certificates_of(authority, days=0)  # valid until now
    for authority_pem, certificate, key, message in (
        (own.authority, own.certificate, other.key, r"security.key: .*node.key does not belong to"),
        (own.authority, foreign.certificate, foreign.key, r"security.certificate: .*node.pem was not issued by"),
        (own.authority, expired.certificate, expired.key, r"security.certificate: .*is valid from .* Renew it"),
        (own.authority, own.authority, authority[1], r"no subject alternative name baton.cluster"),
        (b"", own.certificate, own.key, r"security.ca: .*ca.pem is not a PEM certificate"),
        (own.authority, b"?", own.key, r"security.certificate: .*node.pem is not a PEM certificate"),
        (own.authority, own.certificate, own.certificate, r"security.key: .*is not a PEM private key"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_certificates(*write(tmp_path, authority_pem, certificate, key))


def test_a_missing_file_is_named(authority: tuple[bytes, bytes], tmp_path: Path) -> None:
    own = certificates_of(authority)
    files = write(tmp_path, own.authority, own.certificate, own.key)
    files[2].unlink()
    with pytest.raises(ConfigError, match=r"security.key: .*node.key cannot be read on this node: No such file"):
        read_certificates(*files)


def test_renewed_files_are_read_again_unless_they_do_not_fit(
    authority: tuple[bytes, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = certificates_of(authority), certificates_of(authority)
    files = write(tmp_path, first.authority, first.certificate, first.key)
    certificates = NodeCertificates(*files)
    assert certificates.current() is certificates.current()
    files[1].write_bytes(second.certificate)  # its key follows
    assert certificates.current() == first
    assert "goes on with its earlier certificate: security.key: " in caplog.text
    files[2].unlink()
    assert certificates.current() == first
    files[2].write_bytes(second.key)
    assert certificates.current() == second
    assert certificates.current() is certificates.current()


async def test_servers_and_clients_connect_after_a_renewal(authority: tuple[bytes, bytes]) -> None:
    secret, held = ClusterSecret(create_secret()), [certificates_of(authority, days=0)]
    credentials = PeerCredentials(secret, lambda: held[0])
    good = credentials_with(certificates_of(authority), secret)
    async with serving(credentials) as address, serving(good) as other:
        assert await call(address, good) == "UNAVAILABLE"
        assert await call(other, credentials) == "UNAVAILABLE"
        held[0] = certificates_of(authority)
        assert await call(address, good) == "OK"
        assert await call(other, credentials) == "OK"
