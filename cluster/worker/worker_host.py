"""A worker's process: one model, and one role, which is named by a string."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from typing import Any

import grpc.aio
import ray
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.core.errors import ConfigError, InternalError, UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.logs import configure_logging
from baton.core.memory_budget import MemoryBudget
from baton.core.progress import progress_to
from baton.core.roles import DECODE
from baton.engine.draft.loading import LoadedDraft, load_draft
from baton.engine.models.model_config import check_context_length
from baton.engine.models.model_loader import pick_device
from baton.engine.models.model_source import ModelSource, resolve_model
from baton.engine.runner.device_memory import CudaMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.self_check import check_encoding, check_model
from baton.engine.runner.served_model import load_served_model
from baton.process.cores import usable_cores
from baton.process.garbage import collect_rarely
from baton.rpc.channel import create_server
from baton.rpc.wire import worker_pb2_grpc
from cluster.config.config import BatonConfig
from cluster.config.worker_config import PoolConfig
from cluster.registry.workers import WorkerInfo
from cluster.worker.granted_gpus import hide_ungranted_gpus
from cluster.worker.role import WorkerContext, WorkerRole
from cluster.worker.worker_memory import limit_memory, plan_memory, runner_options
from cluster.worker.worker_service import WorkerService

logger = logging.getLogger(__name__)


class WorkerHost:
    """Hosts a role. Ray calls its methods for control only; requests and KV come over gRPC.

    Args:
        role_path: ``"module:Class"``, implementing :class:`cluster.worker.role.WorkerRole`.
        bind_host: address at which the gRPC server listens and is reached; ``None`` means this node's address.
    """

    def __init__(
        self, worker_id: str, pool: str, role_path: str, config: dict[str, Any], bind_host: str | None
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._role_path = role_path
        self._config = BatonConfig.from_dict(config)
        self._bind_host = bind_host or ray.util.get_node_ip_address()
        self._loaded: tuple[ModelSource, ModelRunner, LoadedDraft | None] | None = None
        self._memory: MemoryBudget | None = None
        self._server: grpc.aio.Server | None = None
        self._role: WorkerRole | None = None
        self._stopping = False
        self._stopped = asyncio.Event()
        self._progress: asyncio.Queue[str] = asyncio.Queue()
        configure_logging(self._config.log, worker_id)
        logger.info("the process is up")  # these lines are the phases of benchmarks/startup.py
        hide_ungranted_gpus()

    async def start(self) -> dict[str, Any]:
        """Loads the model and begins to serve. Returns a :class:`WorkerInfo` as a dictionary.

        Raises:
            BatonError: the model cannot be loaded or cannot run here.
        """
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            loop.call_soon_threadsafe(self._progress.put_nowait, line)

        with progress_to(report):
            self._loaded = await asyncio.to_thread(self._load)
        collect_rarely()
        # The engine's thread sets its own number; other threads must not compete with it for cores.
        torch.set_num_threads(1)
        return await self._serve()

    async def next_progress(self) -> str:
        """Waits for the next line of progress of :meth:`start`."""
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
        if self._loaded is None:
            raise InternalError(f"{self._worker_id} has no model yet")
        source, runner, draft = self._loaded
        context = WorkerContext(
            self._worker_id,
            self._config,
            self._pool_config,
            runner,
            _max_model_len(self._config, runner),
            self._num_threads,
            draft,
        )
        role = _import_role(self._role_path)(context)
        server = create_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(self._worker_id, self._pool, role), server)
        await _add_health_service(server)
        port = server.add_insecure_port(f"{self._bind_host}:0")
        await role.start(server, self._bind_host)
        await role.profile()
        logger.info("the steps are profiled")
        await server.start()
        self._role, self._server = role, server
        return self._info(source, runner, port, context).to_dict()

    async def wait(self) -> None:
        """Waits for :meth:`stop` or a change of role; a caller's reference fails as soon as the process dies.

        Raises:
            InternalError: the engine has failed, so this worker is unusable.
        """
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
        return engine_threads(engine.threads, pick_device(engine.device))

    @property
    def _runs_draft(self) -> bool:
        """Whether workers of this pool run the draft."""
        return self._pool == DECODE or self._config.speculation.draft_on_prefill

    @property
    def _pool_config(self) -> PoolConfig:
        return self._config.pool(self._pool)

    def _load(self) -> tuple[ModelSource, ModelRunner, LoadedDraft | None]:
        config = self._config
        torch.set_num_threads(self._num_threads)
        source = resolve_model(config.model)
        engine = config.engine
        device = pick_device(engine.device)
        memory = CudaMemory(device) if device.type == "cuda" else None
        if memory is not None:
            limit_memory(config, self._pool, memory)
        loaded = load_served_model(source, config.dtype, device, engine.weights, engine.decoder)
        draft = load_draft(config.speculation.draft, config.model, source.path, loaded) if self._runs_draft else None
        network = None if draft is None else draft.network
        spec = loaded.kv_spec(config.engine.block_size, encoding=KVEncoding(config.engine.kv_cache))
        if network is not None:
            spec = spec.with_draft("", network.layer_specs)
        self._memory = plan_memory(config, self._pool, loaded, network, spec, memory)
        logger.info("memory: %s", self._memory.describe())
        runner = ModelRunner(
            loaded,
            self._memory.kv_blocks,
            engine.block_size,
            runner_options(engine),
            draft=network,
        )
        logger.info("the model is loaded")
        if config.engine.self_check:
            check_model(runner)
            logger.info("the self-check is passed")
            self._config = with_checked_encoding(config, runner)
        return source, runner, draft

    def _info(self, source: ModelSource, runner: ModelRunner, port: int, context: WorkerContext) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self._worker_id,
            pool=self._pool,
            address=f"{self._bind_host}:{port}",
            node=os.uname().nodename,
            pid=os.getpid(),
            device=_device_name(runner.device),
            model_name=self._config.served_model_name or source.name,
            max_model_len=context.max_model_len,
            vocab_size=runner.loaded.vocab_size,
            eos_token_ids=tuple(sorted(runner.loaded.eos_token_ids)),
            kv_fingerprint=runner.spec.fingerprint(),
            kv_bytes_per_token=runner.spec.bytes_per_token,
            block_size=runner.spec.block_size,
            dtype=runner.spec.dtype,
            draft_method=context.draft.method if context.draft else "",
            num_threads=context.num_threads,
            chunk_tokens=context.pool.chunk_tokens,
            max_num_seqs=context.pool.max_num_seqs,
            kv_blocks=runner.cache.num_blocks,
            memory=self._memory,
            graph_failure="" if runner.graph_failure is None else runner.graph_failure.describe(),
        )


def engine_threads(configured: int | None, device: torch.device) -> int:
    """CPU threads of an engine. On a GPU one is enough, since the engine copies only small tables on the CPU."""
    return configured or (usable_cores() if device.type == "cpu" else 1)


def with_checked_encoding(config: BatonConfig, runner: ModelRunner) -> BatonConfig:
    """Checks int8 KV with this model. Where its error is too large, replaces ``kv_transfer.encoding: auto`` by native.

    Raises:
        UnsupportedModelError: the error is too large, and int8 is configured.
    """
    kv = config.kv_transfer
    if kv.encoding == "native":
        return config
    try:
        check_encoding(runner, KVEncoding.INT8)
    except UnsupportedModelError as error:
        if kv.encoding != "auto":
            raise
        logger.warning("KV is not sent as int8: %s", error.message)
        return config.model_copy(update={"kv_transfer": kv.model_copy(update={"encoding": "native"})})
    return config


async def _add_health_service(server: grpc.aio.Server) -> None:
    """Adds grpc.health.v1, for generic health probes."""
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)


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
