"""Ray actors of simulated workers: several workers per process, each with its own gRPC server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from baton.core.errors import NotFoundError, WorkerLostError
from baton.core.logs import configure_logging
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.kv_transfer.base import KVTransport
from baton.kv_transfer.transports import create_kv_service, create_transport
from baton.process.descriptors import raise_descriptor_limit
from baton.process.without_torch import do_without_torch
from baton.process.worker_environment import adopt_variables
from baton.rpc.channel import PeerServer, message_limit
from baton.rpc.credentials import PeerCredentials
from cluster.config.config import BatonConfig
from cluster.simulation.profile import load_profile
from cluster.simulation.services import SimulatedServices
from cluster.simulation.settings import worker_settings
from cluster.simulation.worker import SimulatedWorker


class SimulatedWorkerHost:
    """One simulated worker, with the methods that a pool calls on :class:`cluster.worker.worker_host.WorkerHost`.

    Args:
        bind_host: as for :class:`cluster.worker.worker_host.WorkerHost`.
    """

    def __init__(
        self, worker_id: str, pool: str, config: BatonConfig, bind_host: str | None, credentials: PeerCredentials
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._config = config
        self._credentials = credentials
        self._bind_host = bind_host or ray.util.get_node_ip_address()
        self._server: PeerServer | None = None
        self._worker: SimulatedWorker | None = None
        self._transport: KVTransport | None = None
        self._stopped = asyncio.Event()

    async def start(self, model: ServedModel) -> dict[str, Any]:
        """Starts to serve. Returns a :class:`cluster.registry.workers.WorkerInfo` as a dictionary.

        Raises:
            ConfigError: the profile is unknown or wrong, or ``network`` does not fit this node.
        """
        raise_descriptor_limit()
        config = self._config
        self._bind_host = config.network.address_here(self._bind_host)
        settings = worker_settings(
            config,
            load_profile(config.simulation.profile or ""),
            self._worker_id,
            self._pool,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            model_name=model.name,
            hash_key=self._credentials.secret.block_hash_key,
        )
        only_messages = {"transport": "grpc", "shared_memory": "off", "connections": 0, "max_bytes_per_second": None}
        kv = config.kv_transfer.model_copy(update=only_messages)
        transport = create_transport(kv, self._credentials)
        worker = SimulatedWorker(settings, transport)
        server = PeerServer(self._credentials, message_limit(settings.limits.max_model_len, kv.part_bytes))
        SimulatedServices(worker, self._credentials.secret).add_to(server.grpc)
        create_kv_service(kv, self._credentials, worker.sink).add_to(server.grpc)
        address = server.bind(self._bind_host, config.network.port_range)
        await server.start()
        self._server, self._worker, self._transport = server, worker, transport
        proof = self._credentials.secret.peer_proof(address)
        info = settings.info(address, proof, os.uname().nodename, os.getpid())
        node_id = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return replace(info, node_id=node_id).to_dict()

    async def wait(self) -> None:
        """Returns after :meth:`stop`."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Ends the worker and its server."""
        if self._server is not None:
            await self._server.stop(grace=1.0)
        if self._worker is not None:
            self._worker.stop(WorkerLostError(f"{self._worker_id} was stopped"))
        if self._transport is not None:
            await self._transport.close()
        self._stopped.set()


class ServedModel:
    """The name and vocabulary of the model whose tokenizer shows the tokens of simulated workers.

    Raises:
        ConfigError: the model has no usable tokenizer.
    """

    def __init__(self, reference: str) -> None:
        source = resolve_model(reference)
        self.name = source.name
        tokenizer = Tokenizer.load(source.path)
        self.vocab_size = tokenizer.vocab_size
        self.eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


class SimulatedWorkerProcess:
    """A Ray actor that hosts several workers. Its methods take the id of a worker.

    Args:
        variables: as for :class:`cluster.actors.RouterActor`.
    """

    def __init__(self, config: dict[str, Any], name: str, secret: bytes, variables: Mapping[str, str]) -> None:
        adopt_variables(variables)
        do_without_torch()
        self._config = BatonConfig.from_dict(config)
        self._secret = secret
        self._hosts: dict[str, SimulatedWorkerHost] = {}
        self._model: asyncio.Task[ServedModel] | None = None
        configure_logging(self._config.log, name)

    async def start(self, worker_id: str, pool: str, bind_host: str | None) -> dict[str, Any]:
        if self._model is None:
            self._model = asyncio.create_task(asyncio.to_thread(ServedModel, self._config.model))
        credentials = self._config.security.credentials(self._secret)
        host = self._hosts[worker_id] = SimulatedWorkerHost(worker_id, pool, self._config, bind_host, credentials)
        return await host.start(await asyncio.shield(self._model))

    async def wait(self, worker_id: str) -> None:
        await self._host(worker_id).wait()

    async def stop(self, worker_id: str) -> None:
        """Stops a worker. Unknown workers are ignored."""
        host = self._hosts.pop(worker_id, None)
        if host is not None:
            await host.stop()

    def _host(self, worker_id: str) -> SimulatedWorkerHost:
        host = self._hosts.get(worker_id)
        if host is None:
            raise NotFoundError(f"{worker_id} is not in this process.")
        return host
