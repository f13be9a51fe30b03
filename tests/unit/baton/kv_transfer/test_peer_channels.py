"""Channels to peers are shared, never closed under a stream, and closed when unused."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import WorkerLostError
from baton.kv_transfer import peer_channels
from baton.kv_transfer.peer_channels import PeerChannels
from baton.rpc.credentials import PeerCredentials
from tests.credentials import CREDENTIALS
from tests.waiting import TIMEOUT_S


class FakeChannel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = asyncio.Event()

    async def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        self.closed.set()


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeChannel]:
    """All channels, in the order in which they were made."""
    channels: list[FakeChannel] = []

    def create(address: str, credentials: PeerCredentials) -> FakeChannel:
        channels.append(FakeChannel(address))
        return channels[-1]

    monkeypatch.setattr(peer_channels, "create_channel", create)
    return channels


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_streams_to_one_peer_share_a_channel(made: list[FakeChannel]) -> None:
    channels = PeerChannels(CREDENTIALS)
    first, second, other = channels.take("a:1"), channels.take("a:1"), channels.take("b:1")
    assert first is second
    assert other is not first
    assert [channel.address for channel in made] == ["a:1", "b:1"]
    await channels.close()


async def test_an_unused_channel_is_closed(made: list[FakeChannel]) -> None:
    channels = PeerChannels(CREDENTIALS, idle_s=0.01)
    channels.give_back(channels.take("a:1"))
    await asyncio.wait_for(made[0].closed.wait(), TIMEOUT_S)
    channels.take("a:1")
    assert len(made) == 2
    await channels.close()
    assert made[1].closed.is_set()


async def test_a_channel_with_a_stream_is_never_idle(made: list[FakeChannel]) -> None:
    channels = PeerChannels(CREDENTIALS, idle_s=0.01)
    first = channels.take("a:1")
    channels.give_back(first)
    again, third = channels.take("a:1"), channels.take("a:1")
    channels.give_back(third)
    await asyncio.sleep(0.05)
    assert again is first
    assert not made[0].closed.is_set()
    await channels.close()


async def test_a_retired_channel_is_closed_with_its_last_stream(made: list[FakeChannel]) -> None:
    channels = PeerChannels(CREDENTIALS)
    first, second = channels.take("a:1"), channels.take("a:1")
    channels.retire(first)
    assert channels.take("a:1") is not first
    channels.give_back(first)
    await settle()
    assert not made[0].closed.is_set()
    channels.retire(second)  # twice does nothing
    channels.give_back(second)
    await settle()
    assert made[0].closed.is_set()
    assert not made[1].closed.is_set()
    await channels.close()


async def test_closing_ends_all_channels_and_refuses_new_ones(made: list[FakeChannel]) -> None:
    channels = PeerChannels(CREDENTIALS)
    used, retired, idle = channels.take("a:1"), channels.take("b:1"), channels.take("c:1")
    channels.retire(retired)
    channels.give_back(idle)
    await channels.close()
    assert all(channel.closed.is_set() for channel in made)
    channels.give_back(used)  # its stream ends with the channel
    channels.give_back(retired)
    await settle()
    with pytest.raises(WorkerLostError, match="has been closed"):
        channels.take("a:1")
