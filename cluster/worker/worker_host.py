"""A worker's process: one model, and one role, which is named by a string."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from typing import Any

import ray
import torch

from baton.core.errors import ConfigError, InternalError
from baton.core.logs import configure_logging
from baton.core.progress import progress_to
from baton.engine.device.device_errors import DeviceLostError
from baton.engine.models.model_config import check_context_length
from baton.engine.models.model_loader import pick_device
from baton.engine.parallel.followers import Followers
from baton.engine.runner.model_runner import ModelRunner
from baton.process.descriptors import raise_descriptor_limit
from baton.process.garbage import collect_rarely
from baton.rpc.channel import PeerServer, message_limit
from baton.rpc.credentials import PeerCredentials
from baton.rpc.wire import worker_pb2_grpc
from cluster.config.config import BatonConfig
from cluster.config.worker_config import PoolConfig
from cluster.losses.open_call import OpenCall
from cluster.losses.orphan_watch import end_without_controller
from cluster.registry.workers import WorkerInfo
from cluster.worker.granted_gpus import hide_ungranted_gpus
from cluster.worker.role import WorkerContext, WorkerRole
from cluster.worker.worker_model import RankTask, WorkerModel, engine_threads, load_with_followers, load_worker_model
from cluster.worker.worker_service import WorkerService

logger = logging.getLogger(__name__)

_UCX_PORTS = "UCX_TCP_PORT_RANGE"
"""NIXL's library chooses its own port, from this range."""


class WorkerHost:
    """Hosts a role. Ray calls its methods for control only; requests and KV come over gRPC.

    Args:
        role_path: ``"module:Class"``, implementing :class:`cluster.worker.role.WorkerRole`.
        bind_host: address at which the worker listens and is reached unless ``network.address`` names one; ``None``
            means this node's address.
        secret: the cluster's secret.
    """

    def __init__(
        self,
        worker_id: str,
        pool: str,
        role_path: str,
        config: dict[str, Any],
        bind_host: str | None,
        secret: bytes,
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._role_path = role_path
        self._config = BatonConfig.from_dict(config)
        self._given_config = self._config
        self._secret = secret
        self._credentials: PeerCredentials | None = None
        self._bind_host = bind_host or ray.util.get_node_ip_address()
        self._loaded: WorkerModel | None = None
        self._followers: Followers | None = None
        self._server: PeerServer | None = None
        self._role: WorkerRole | None = None
        self._served_info: WorkerInfo | None = None
        self._stopping = False
        self._stopped = asyncio.Event()
        self._waiting = OpenCall()
        self._progress: asyncio.Queue[str | None] = asyncio.Queue()
        configure_logging(self._config.log, worker_id)
        logger.info("the process is up")  # these lines are the phases of benchmarks/startup.py
        raise_descriptor_limit()
        hide_ungranted_gpus()
        end_without_controller(self._config.ray)

    async def start(self) -> dict[str, Any]:
        """Loads the model and begins to serve. Returns a :class:`WorkerInfo` as a dictionary.

        Raises:
            BatonError: the model cannot be loaded or run here, or ``network`` or the certificates do not fit this node.
        """
        self._credentials = self._config.security.credentials(self._secret)
        network = self._config.network
        self._bind_host = network.address_here(self._bind_host)
        if network.ports is not None:
            os.environ.setdefault(_UCX_PORTS, network.ports)
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            loop.call_soon_threadsafe(self._progress.put_nowait, line)

        with progress_to(report):
            self._loaded = await asyncio.to_thread(self._load)
        self._progress.put_nowait(None)
        self._config = self._loaded.config
        collect_rarely()
        # The engine's thread sets its own number; other threads must not compete with it for cores.
        torch.set_num_threads(1)
        return await self._serve()

    async def describe(self) -> dict[str, Any]:
        """What the next controller must know. ``info`` is ``None`` unless the worker is ready."""
        info = self._served_info if self._role is not None else None
        return {
            "config": self._given_config.to_dict(),
            "secret": self._secret,
            "info": None if info is None else info.to_dict(),
        }

    async def next_progress(self) -> str | None:
        """Waits for the next line of progress of :meth:`start`; ``None`` follows the last one."""
        return await self._progress.get()

    async def change_role(self, worker_id: str, pool: str, role_path: str) -> dict[str, Any]:
        """Ends the role and begins another one with the same weights and a new name. Returns what :meth:`start` does.

        The caller must have drained the worker. The KV cache's memory is kept, and its content is forgotten.

        Raises:
            BatonError: the worker does not serve, or the new role cannot run here.
        """
        if self._role is None or self._loaded is None:
            raise InternalError(f"{self._worker_id} does not serve requests yet and cannot change its role")
        await self._end_role()
        self._worker_id, self._pool, self._role_path = worker_id, pool, role_path
        configure_logging(self._config.log, worker_id)
        return await self._serve()

    async def _serve(self) -> dict[str, Any]:
        loaded, credentials = self._loaded, self._credentials
        if loaded is None or credentials is None:
            raise InternalError(f"{self._worker_id} has no model yet")
        runner = loaded.runner
        context = WorkerContext(
            self._worker_id,
            self._config,
            self._pool_config,
            runner,
            _max_model_len(self._config, runner),
            self._num_threads,
            credentials,
            loaded.draft,
            loaded.grammars,
        )
        role = _import_role(self._role_path)(context)
        server = PeerServer(credentials, message_limit(context.max_model_len, self._config.kv_transfer.part_bytes))
        worker_pb2_grpc.add_WorkerServicer_to_server(
            WorkerService(self._worker_id, self._pool, role, context.bookings), server.grpc
        )
        address = server.bind(self._bind_host, self._config.network.port_range)
        await role.start(server.grpc, self._bind_host)
        await role.profile()
        logger.info("the steps are profiled")
        await server.start()
        self._role, self._server = role, server
        self._served_info = self._info(loaded, address, context)
        return self._served_info.to_dict()

    async def wait(self) -> None:
        """Waits for :meth:`stop`, a change of role or another call; a reference fails as soon as the process dies.

        Raises:
            InternalError: the engine has failed, so this worker is unusable.
        """
        await self._waiting.run(self._wait())

    async def _wait(self) -> None:
        role = self._role
        if role is not None:
            await role.closed()
            if role is not self._role:
                return
            if not self._stopping:
                raise InternalError(f"the engine of {self._worker_id} failed; see its log")
        await self._stopped.wait()

    async def stop(self) -> None:
        """Ends the role and its server."""
        self._stopping = True
        await self._end_role()
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)
        self._stopped.set()

    async def _end_role(self) -> None:
        role, self._role = self._role, None
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=1.0)
        if role is not None:
            await role.stop()

    @property
    def _num_threads(self) -> int:
        engine = self._config.engine
        return engine_threads(engine.threads, pick_device(engine.device), self._pool_config.num_ranks)

    @property
    def _pool_config(self) -> PoolConfig:
        return self._config.pool(self._pool)

    def _load(self) -> WorkerModel:
        device = pick_device(self._config.engine.device)
        num_ranks = self._pool_config.num_ranks
        if num_ranks == 1:
            return load_worker_model(self._config, self._pool, device)
        self._followers = Followers(num_ranks)
        task = RankTask(self._worker_id, self._config.to_dict(), self._pool)
        try:
            return load_with_followers(task, self._config, self._followers, device)
        except DeviceLostError as error:
            self._followers.close()
            raise InternalError(f"{self._worker_id} could not start: {error}") from error
        except BaseException:
            self._followers.close()
            raise

    def _info(self, loaded: WorkerModel, address: str, context: WorkerContext) -> WorkerInfo:
        runner = loaded.runner
        return WorkerInfo(
            worker_id=self._worker_id,
            pool=self._pool,
            address=address,
            peer_proof=context.credentials.secret.peer_proof(address),
            node=os.uname().nodename,
            pid=os.getpid(),
            device=_device_name(runner.device),
            model_name=next(iter(self._config.served_model_names), loaded.source.name),
            max_model_len=context.max_model_len,
            vocab_size=runner.loaded.vocab_size,
            eos_token_ids=tuple(sorted(runner.loaded.eos_token_ids)),
            kv_fingerprint=runner.spec.fingerprint(),
            kv_bytes_per_token=runner.spec.bytes_per_token,
            block_size=runner.spec.block_size,
            dtype=runner.spec.dtype,
            draft_method=context.draft.method if context.draft else "",
            num_ranks=context.pool.num_ranks,
            num_threads=context.num_threads,
            chunk_tokens=context.pool.chunk_tokens,
            max_num_seqs=context.pool.max_num_seqs,
            kv_blocks=runner.cache.num_blocks,
            memory=loaded.memory,
            node_id=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
            graph_failure="" if runner.graph_failure is None else runner.graph_failure.describe(),
        )


def _import_role(path: str) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InternalError(f"the role {path!r} cannot be imported: {error}") from error


def _max_model_len(config: BatonConfig, runner: ModelRunner) -> int:
    """The configured length, else the minimum of the model's context and this worker's KV cache."""
    own = runner.loaded.max_model_len
    capacity = runner.cache.num_blocks * runner.spec.block_size
    if config.max_model_len is None:
        return min(own, capacity)
    check_context_length(config.max_model_len, own)
    if config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the worker's KV cache holds {capacity} tokens. "
            "Lower max_model_len, or raise kv_blocks or kv_memory_gib (on a GPU: engine.gpu_memory_utilization)."
        )
    return config.max_model_len


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
