"""The configuration: frozen, strict, and with defaults that work on a laptop.

``deploy/local.yaml`` lists every key with its default; a test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from baton.core.config_section import NonEmptyString, PositiveInt, PositiveSeconds, Section
from baton.core.errors import ConfigError
from baton.core.logs import LogConfig
from baton.core.option_text import is_host_and_port
from baton.core.roles import BUNDLED_DRAFTS
from baton.engine.models.default_model import DEFAULT_MODEL_NAME, is_default_model
from baton.kv_transfer.kv_transfer_config import KVTransferConfig
from cluster.admission.admission_config import AdmissionConfig
from cluster.autoscaling.autoscaler_config import AutoscalerConfig
from cluster.config.config_reading import explain, merge_overrides, read_yaml
from cluster.config.network_config import NetworkConfig
from cluster.config.router_config import RouterConfig
from cluster.config.security_config import SecurityConfig
from cluster.config.slo_config import SloConfig
from cluster.config.worker_config import DecodeConfig, EngineConfig, PoolConfig, PrefillConfig, SpeculationConfig
from cluster.gateway.api_keys import ApiKeys
from cluster.jobs.jobs_config import JobsConfig
from cluster.registry.liveness_config import LivenessConfig
from cluster.routing.routing_config import RoutingConfig
from cluster.telemetry.telemetry_config import TelemetryConfig

_LOCAL_CPUS = 64
_ATTEMPTS = 5
_LEAST_ATTEMPT_S = 30.0
"""A busy machine imports for ten seconds."""


class RayConfig(Section):
    """The Ray cluster in which the workers run."""

    address: NonEmptyString | None = None
    """null: start a local cluster; auto: use the cluster of this machine; host:port: connect there."""
    namespace: NonEmptyString = "baton"
    """The Ray namespace of router, controller and workers."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster claims to have; null: 64, since workers on one machine share its cores."""
    start_timeout_s: PositiveSeconds = 600.0
    """Time limit for all workers to be ready. The first start on a machine compiles the decoder, which takes minutes on
    slow CPUs."""
    orphan_timeout_s: PositiveSeconds = 300.0
    """How long router and workers of a cluster that is not local serve without a controller before they end."""

    @property
    def attempt_timeout_s(self) -> float:
        """How long a router may take to start, and a worker that starts may be silent, before another one is tried.
        Several attempts fit into ``start_timeout_s``, unless that is short."""
        return max(self.start_timeout_s / _ATTEMPTS, _LEAST_ATTEMPT_S)

    @property
    def is_local(self) -> bool:
        """Whether Ray is started for this cluster alone, on this machine alone, so that no node can join it."""
        return self.address is None

    @property
    def local_cpus(self) -> int | None:
        """CPUs for the workers of a local cluster; ``None`` when the cluster is not local."""
        return (self.num_cpus or _LOCAL_CPUS) if self.is_local else None

    @field_validator("address")
    @classmethod
    def _address_of_a_cluster(cls, address: str | None) -> str | None:
        if address is not None and address != "auto" and not is_host_and_port(address):
            raise ValueError(
                f"{address!r} is not an address; expected auto, host:port, or null for a local cluster. Instead of a"
                " ray:// address, use auto on a machine of that cluster"
            )
        return address


class SimulationConfig(Section):
    """Simulated workers in place of real ones. See ``docs/simulation.md``."""

    profile: NonEmptyString | None = None
    """The step durations: the name of a built-in profile, or a YAML file. null: workers are real."""
    workers_per_process: PositiveInt = 32
    """Number of simulated workers that share a process."""
    tokens_per_message: PositiveInt = 16
    """Maximum number of tokens per message of a stream; the first messages have fewer."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the noise of step durations."""


class BatonConfig(Section):
    """The whole configuration of a cluster."""

    model: NonEmptyString = DEFAULT_MODEL_NAME
    """Name of the default model, hub id, local folder, or GGUF file."""
    served_model_name: NonEmptyString | Annotated[list[NonEmptyString], Field(min_length=1)] | None = None
    """Name of the model for clients, or several of them; null: the last part of ``model``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Limit of prompt and output tokens together; null: the model's limit."""
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    security: SecurityConfig = SecurityConfig()
    ray: RayConfig = RayConfig()
    network: NetworkConfig = NetworkConfig()
    liveness: LivenessConfig = LivenessConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    slo: SloConfig = SloConfig()
    routing: RoutingConfig = RoutingConfig()
    simulation: SimulationConfig = SimulationConfig()
    admission: AdmissionConfig = AdmissionConfig()
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    jobs: JobsConfig = JobsConfig()

    @field_validator("served_model_name")
    @classmethod
    def _names_differ(cls, names: str | list[str] | None) -> str | list[str] | None:
        if isinstance(names, list) and len(set(names)) < len(names):
            raise ValueError(f"every name must occur once, got {', '.join(names)}")
        return names

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The configured names of the model for clients, the main one first; empty if it has its own name."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else tuple(names or ())

    @model_validator(mode="after")
    def _api_keys_have_classes(self) -> BatonConfig:
        for api_key in self.router.api_keys:
            if api_key.slo_class is not None and api_key.slo_class not in self.slo.classes:
                raise ValueError(
                    f"router.api_keys: the key {api_key.name!r} has the SLO class {api_key.slo_class!r}, which does"
                    f" not exist; choose one of {', '.join(self.slo.classes)}, or define it in slo.classes"
                )
        return self

    @model_validator(mode="after")
    def _gpus_for_cuda(self) -> BatonConfig:
        if self.engine.device == "cuda":
            for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
                if pool.resources.gpus == 0:
                    raise ValueError(
                        f"engine.device is cuda, but {name}.resources.gpus is 0 so Ray hides every GPU from the"
                        f" workers; set {name}.resources.gpus to 1, or engine.device to auto or cpu"
                    )
        return self

    @model_validator(mode="after")
    def _whole_models_for_the_fused_decoder(self) -> BatonConfig:
        engine = self.engine
        asks = "decoder: fused" if engine.decoder == "fused" else f"weights: {engine.weights}"
        if engine.decoder == "fused" or engine.weights in ("int8", "int4"):
            for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
                if pool.num_ranks > 1:
                    raise ValueError(
                        f"engine: {asks} needs the fused decoder, which computes whole models only, but workers of"
                        f" {name} divide the model among {pool.num_ranks} processes; remove that key, or set"
                        f" {name}.tensor_parallel and {name}.resources.gpus to at most 1"
                    )
        return self

    @model_validator(mode="after")
    def _kv_is_encoded_once(self) -> BatonConfig:
        if self.engine.kv_cache != "native" and self.kv_transfer.encoding != "native":
            raise ValueError(
                f"engine.kv_cache is {self.engine.kv_cache}, so KV is already encoded when it is sent, and"
                f" kv_transfer.encoding must be native, got {self.kv_transfer.encoding}"
            )
        return self

    @model_validator(mode="after")
    def _kv_is_encrypted(self) -> BatonConfig:
        if self.security.ca is not None and self.kv_transfer.transport == "nixl":
            raise ValueError(
                "kv_transfer.transport is nixl, which does not encrypt KV, but security has certificates; set"
                " kv_transfer.transport to grpc, or leave security out on a network that is yours alone"
            )
        return self

    @model_validator(mode="after")
    def _pools_within_limits(self) -> BatonConfig:
        scaler = self.autoscaler
        for name, limits in (("prefill", scaler.prefill), ("decode", scaler.decode)) if scaler.enabled else ():
            workers = self.pool(name).workers
            if not limits.min <= workers <= limits.max:
                raise ValueError(
                    f"{name}.workers is {workers}, but autoscaler.{name} allows {limits.min} to {limits.max};"
                    f" set {name}.workers within this range, or adjust autoscaler.{name}.min and max"
                )
        return self

    @classmethod
    def section_names(cls) -> frozenset[str]:
        """The keys whose values are sections."""
        return frozenset(name for name, field in cls.model_fields.items() if isinstance(field.default, Section))

    def pool(self, name: str) -> PoolConfig:
        """The configuration of the pool ``prefill`` or ``decode``; KeyError for another name."""
        pools: dict[str, PoolConfig] = {"prefill": self.prefill, "decode": self.decode}
        return pools[name]

    def role_change_obstacle(self, *, has_draft: bool = False) -> str:
        """Why no worker can change its role and keep its weights and cache, and what to do; empty if one can.

        Args:
            has_draft: whether decode workers have loaded a draft.
        """
        prefill, decode = self.prefill, self.decode
        if self.simulation.profile is not None:
            return "simulated workers have no weights to keep; scale the pools instead."
        if prefill.resources != decode.resources:
            return (
                "prefill.resources and decode.resources differ, and a process cannot change its Ray resources. "
                "Make them equal, or start new workers."
            )
        if prefill.num_ranks != decode.num_ranks:
            return (
                "prefill.tensor_parallel and decode.tensor_parallel differ, and a process keeps its part of the model. "
                "Make them equal, or start new workers."
            )
        if (prefill.kv_blocks, prefill.kv_memory_gib) != (decode.kv_blocks, decode.kv_memory_gib):
            return (
                "prefill and decode have KV caches of different sizes (kv_blocks, kv_memory_gib), and a process cannot "
                "resize its cache. Make them equal, or start new workers."
            )
        if has_draft and not self.speculation.draft_on_prefill:
            return (
                "prefill workers have no draft loaded, but decode workers need one. Set speculation.draft_on_prefill, "
                "or start new workers."
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready values, from which ``from_dict`` restores it."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "configuration") -> BatonConfig:
        """Builds a configuration from plain values.

        Args:
            source: where the values come from, for error messages.

        Raises:
            ConfigError: values are wrong; the message names each key at fault and what was expected.
        """
        return _build(values, source, {})


def load_config(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None
) -> BatonConfig:
    """Reads a configuration file and applies overrides; without either, returns the defaults.

    A ``model``, draft or certificate that names a local folder or file becomes an absolute path, so that workers in
    other working folders find it. A relative path is resolved against the configuration's folder first, then the
    current folder.

    Args:
        overrides: dotted key → value, as ``parse_override`` reads them from ``--set``.
        base: the values that overrides change if there is no file, as from :meth:`BatonConfig.to_dict`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or the file or the overrides have wrong keys or values.
    """
    overrides = overrides or {}
    values = (base or {}) if path is None else read_yaml(path)
    config = _build(merge_overrides(values, overrides), str(path or "configuration"), overrides)

    def located(key: str, reference: str) -> str:
        folders = [Path.cwd()] if path is None or key in overrides else [path.absolute().parent, Path.cwd()]
        return _locate(key, reference, folders)

    speculation = config.speculation
    if speculation.draft not in ("auto", "none", *BUNDLED_DRAFTS):
        draft = located("speculation.draft", speculation.draft)
        speculation = speculation.model_copy(update={"draft": draft})
    simulation = config.simulation
    if simulation.profile is not None:
        profile = located("simulation.profile", simulation.profile)
        simulation = simulation.model_copy(update={"profile": profile})
    # Resolved here, because the router may run on another machine, without the caller's variables and files.
    folders = [Path.cwd()] if path is None else [path.absolute().parent, Path.cwd()]
    api_keys = [api_key.sealed(folders) for api_key in config.router.api_keys]
    ApiKeys(api_keys)  # reports duplicate keys now rather than when the router starts
    tls = config.router.tls
    if tls is not None:
        files = {"certificate": tls.certificate, "key": tls.key}
        tls = tls.model_copy(update={key: located(f"router.tls.{key}", path) for key, path in files.items()})
    router = config.router.model_copy(update={"api_keys": api_keys, "tls": tls})
    security = config.security
    files = {key: file for key, file in security.model_dump().items() if file is not None}
    security = security.model_copy(update={key: located(f"security.{key}", file) for key, file in files.items()})
    model = located("model", config.model)
    updates = {
        "model": model,
        "speculation": speculation,
        "router": router,
        "security": security,
        "simulation": simulation,
    }
    return config.model_copy(update=updates)


def _build(values: Mapping[str, Any], source: str, overrides: Mapping[str, Any]) -> BatonConfig:
    # YAML reads a section whose keys are all commented out as null; it means the defaults.
    present = {
        key: value for key, value in values.items() if value is not None or key not in BatonConfig.section_names()
    }
    try:
        return BatonConfig.model_validate(present)
    except ValidationError as error:
        raise ConfigError(explain(error, BatonConfig, source, tuple(overrides))) from error


def _locate(key: str, reference: str, folders: Sequence[Path]) -> str:
    if is_default_model(reference):
        return reference
    expanded = Path(reference).expanduser()
    for folder in folders:
        candidate = folder / expanded
        if candidate.exists():
            return str(candidate.resolve())
    if expanded.is_absolute() or reference.startswith((".", "~")) or expanded.suffix == ".gguf":
        looked = " and ".join(dict.fromkeys(str(folder / expanded) for folder in folders))
        raise ConfigError(
            f"{key}: {reference} is a local path, but there is no file or folder at {looked}. Correct the path."
        )
    return reference
