"""The endpoint over TLS, and the commands that trust it."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from baton.client.local_cluster import RunState, write_state
from baton.client.router_client import RouterClient, UntrustedRouterError
from baton.client.trust import tls_context
from baton.core.errors import ConfigError
from cluster.cli.cli_up import check_configuration
from cluster.config.config import BatonConfig, load_config
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.tls import TlsConfig, create_tls_context, load_certificate
from tests.certificates import Files, self_signed
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeAdmin, FakeGenerator, say
from tests.unit.cluster.gateway.edge_serving import answer_to, serving

TOKENIZER = byte_level_tokenizer()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BATON_CA", raising=False)
    monkeypatch.delenv("BATON_API_KEY", raising=False)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return self_signed(tmp_path / "own")


def serving_over_tls(files: Files, **options):
    app = create_app(FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")), TOKENIZER, FakeAdmin(), GatewayLimits())
    return serving(app, tls=create_tls_context(TlsConfig(**files.config)), **options)


def record(endpoint: str, files: Files) -> None:
    state = RunState.of_this_process(BatonConfig.from_dict({"router": {"tls": files.config}}).to_dict())
    write_state(replace(state, endpoint=endpoint))


async def test_commands_trust_the_certificate_of_the_recorded_cluster(tmp_path: Path) -> None:
    files = self_signed(tmp_path / "own", "baton.example.com")  # not issued for 127.0.0.1
    async with serving_over_tls(files) as (host, port):
        endpoint = f"https://{host}:{port}"
        async with RouterClient(endpoint) as client:
            with pytest.raises(UntrustedRouterError, match="BATON_CA"):
                await client.status()
        record(endpoint, files)
        async with RouterClient(endpoint) as client:
            assert (await client.status())["pools"]
        record(endpoint, self_signed(tmp_path / "other", "baton.example.com"))
        async with RouterClient(endpoint) as client:
            with pytest.raises(UntrustedRouterError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.status()


async def test_commands_trust_a_named_authority(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_over_tls(files) as (host, port):
        async with RouterClient(f"https://{host}:{port}", files.certificate) as client:
            assert "pools" in await client.status()
        monkeypatch.setenv("BATON_CA", str(files.certificate))
        async with RouterClient(f"https://{host}:{port}") as client:
            assert (await client.status())["pools"]
    named = self_signed(tmp_path / "named", "baton.example.com")
    async with serving_over_tls(named) as (host, port):
        monkeypatch.setenv("BATON_CA", str(named.certificate))
        async with RouterClient(f"https://{host}:{port}") as client:
            with pytest.raises(UntrustedRouterError, match="CERTIFICATE_VERIFY_FAILED"):  # another name
                await client.status()


def test_certificates_to_trust_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"BATON_CA: cannot read .*missing\.pem"):
        tls_context("https://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"--ca: cannot read .*other\.pem"):
        tls_context("https://127.0.0.1:1", tmp_path / "other.pem")
    (tmp_path / "missing.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="PEM"):
        tls_context("https://127.0.0.1:1")
    assert tls_context("http://127.0.0.1:1") is None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_and_plain_http_are_refused(files: Files) -> None:
    async with serving_over_tls(files) as address:
        client = ssl.create_default_context(cafile=str(files.certificate))
        client.set_ciphers("ALL:@SECLEVEL=0")
        client.minimum_version = ssl.TLSVersion.TLSv1
        client.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*address, ssl=client)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        client = ssl.create_default_context(cafile=str(files.certificate))
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        _, writer = await asyncio.open_connection(*address, ssl=client)
        writer.close()


async def test_connections_beyond_the_limit_are_refused_over_tls(files: Files) -> None:
    client = ssl.create_default_context(cafile=str(files.certificate))
    async with serving_over_tls(files, max_connections=1) as address:
        _, kept = await asyncio.open_connection(*address, ssl=client)
        first, _, body = await answer_to(address, GET.replace(b"/health", b"/v1/models"), ssl=client)
        assert first.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "endpoint_full"
        assert (await answer_to(address, GET, ssl=client))[0].startswith(b"HTTP/1.1 200")
        kept.close()


async def test_a_renewed_certificate_serves_new_connections(files: Files, tmp_path: Path) -> None:
    context = create_tls_context(TlsConfig(**files.config))
    renewed = self_signed(tmp_path / "renewed")
    async with serving(lambda *_: None, tls=context) as address:
        load_certificate(context, TlsConfig(**renewed.config))
        client = ssl.create_default_context(cafile=str(renewed.certificate))
        _, writer = await asyncio.open_connection(*address, ssl=client)
        writer.close()


def test_paths_are_relative_to_the_configuration(tmp_path: Path, files: Files) -> None:
    (tmp_path / "baton.yaml").write_text("router: {tls: {certificate: own/endpoint.pem, key: own/endpoint.key}}")
    tls = load_config(tmp_path / "baton.yaml").router.tls
    assert tls is not None
    assert (tls.certificate, tls.key) == (str(files.certificate), str(files.key))


def refused(certificate: Path, key: Path) -> str:
    """The error with which `baton up` ends before anything is loaded."""
    config = BatonConfig.from_dict({"router": {"tls": {"certificate": str(certificate), "key": str(key)}}})
    with pytest.raises(ConfigError) as caught:
        check_configuration(config)
    return caught.value.message


def test_wrong_files_are_named_before_anything_is_loaded(tmp_path: Path, files: Files) -> None:
    assert "cannot read" in refused(tmp_path / "missing.pem", files.key)
    assert "router.tls.key: cannot read" in refused(files.certificate, tmp_path / "missing.key")
    assert "is not a certificate" in refused(files.key, files.key)
    assert "is not a private key" in refused(files.certificate, files.certificate)
    assert "does not belong to the certificate" in refused(files.certificate, self_signed(tmp_path / "b").key)
    past = self_signed(tmp_path / "past", begins=timedelta(days=-9))
    assert "has expired on" in refused(past.certificate, past.key)
    future = self_signed(tmp_path / "future", begins=timedelta(days=9))
    assert "is valid from" in refused(future.certificate, future.key)
    locked = self_signed(tmp_path / "locked", password=b"secret")
    assert "is encrypted with a password" in refused(locked.certificate, locked.key)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_key_is_named(files: Files) -> None:
    files.key.chmod(0)
    assert "router.tls.key: cannot read" in refused(files.certificate, files.key)
