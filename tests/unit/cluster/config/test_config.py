"""The configuration is strict, has clear errors, and reaches an actor unchanged."""

import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from cluster.autoscaling.autoscaler_config import AutoscalerConfig
from cluster.config.config import BatonConfig, load_config
from cluster.config.config_reading import parse_override
from cluster.config.worker_config import SpeculationConfig

DEPLOY = Path(__file__).parents[4] / "deploy"


def error_for(tmp_path: Path, text: str, *assignments: str) -> str:
    file = tmp_path / "baton.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, dict(parse_override(assignment) for assignment in assignments))
    return caught.value.message


def test_the_commented_default_equals_the_built_in_defaults():
    assert load_config(DEPLOY / "local.yaml") == BatonConfig()


def test_the_commented_default_spells_out_every_key():
    import yaml

    def keys(values: dict[str, object]) -> dict[str, object]:
        return {key: keys(value) if isinstance(value, dict) else None for key, value in values.items()}

    written = yaml.safe_load((DEPLOY / "local.yaml").read_text(encoding="utf-8"))
    assert keys(written) == keys(BatonConfig().to_dict())


def test_single_methods_may_have_longer_drafts():
    config = SpeculationConfig(max_draft_tokens=6, max_tree_tokens=12, draft_tokens={"suffix": 32})
    assert (config.chain_tokens("suffix"), config.chain_tokens("ngram")) == (32, 6)
    assert config.largest_draft == 32
    assert SpeculationConfig().largest_draft == 16


@pytest.mark.parametrize(
    ("values", "wanted"),
    [({}, "auto"), ({"method": "medusa"}, "medusa"), ({"method": "none"}, None),
     ({"method": "none", "shadow": "draft_model"}, "draft_model")],
)  # fmt: skip
def test_a_draft_is_chosen_for_the_method_that_drafts(values: dict[str, str], wanted: str | None):
    assert SpeculationConfig.model_validate(values).wanted_draft == wanted


def test_the_gpu_example_places_pools_on_different_accelerators():
    config = load_config(DEPLOY / "gpu-cluster.yaml")
    assert config.prefill.resources.accelerator_type == "H100"
    assert config.decode.resources.accelerator_type == "H200"
    assert (config.prefill.num_ranks, config.decode.num_ranks) == (4, 2)
    assert config.ray.address == "auto"


@pytest.mark.parametrize(
    ("pool", "num_ranks"),
    [
        ({}, 1),
        ({"tensor_parallel": 3}, 3),
        ({"resources": {"gpus": 0.5}}, 1),
        ({"resources": {"gpus": 1}}, 1),
        ({"resources": {"gpus": 4}}, 4),
        ({"tensor_parallel": 4, "resources": {"gpus": 4}}, 4),
        ({"tensor_parallel": 1, "resources": {"gpus": 0.5}}, 1),
    ],
)
def test_a_worker_has_a_rank_for_each_gpu_or_as_many_as_configured(pool, num_ranks):
    config = BatonConfig.from_dict({"decode": pool})
    assert config.decode.num_ranks == num_ranks
    assert config.prefill.num_ranks == 1
    obstacle = config.role_change_obstacle()
    assert ("resources" in obstacle or "tensor_parallel" in obstacle) == (pool not in ({}, {"tensor_parallel": 1}))


@pytest.mark.parametrize("name", ["local.yaml", "gpu-cluster.yaml"])
def test_a_configuration_round_trips_through_json(name):
    config = load_config(DEPLOY / name)
    assert BatonConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_is_immutable():
    with pytest.raises(Exception, match="frozen"):
        BatonConfig().router.port = 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "router: {prot: 1}",
            "unknown key router.prot. Did you mean router.port? Known keys in router: allowed_hosts,",
        ),
        ("prefil: {workers: 1}", "unknown key prefil. Did you mean prefill? Known keys at the top level: admission,"),
        ("workers: 2", "unknown key workers. Did you mean prefill.workers or decode.workers?"),
        ("zzz: 2", "unknown key zzz. Known keys at the top level:"),
        ("decode: {resources: {gpu: 1}}", "unknown key decode.resources.gpu. Did you mean decode.resources.gpus?"),
        ("log: {json_lines: true}", "unknown key log.json_lines. Did you mean log.json?"),
        ("router: {port: '8000'}", "router.port must be a valid integer, got '8000'."),
        ("router: {port: 70000}", "router.port must be less than or equal to 65535, got 70000."),
        ("router: {port: 1.5}", "router.port must be a valid integer, got 1.5"),
        ("router: {port: true}", "router.port must be a valid integer, got True."),
        (
            "router: {tool_parser: hermse}",
            "router.tool_parser: 'hermse' is not a known format; expected one of auto, none, hermes, qwen_xml,",
        ),
        (
            "router: {reasoning_parser: r1}",
            "router.reasoning_parser: 'r1' is not a known format; expected one of auto,",
        ),
        ("router: 8000", "router must be a section with keys of its own, got 8000."),
        ("decode: {workers: 0}", "decode.workers must be greater than or equal to 1, got 0."),
        ("dtype: bfloat61", "dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got 'bfloat61'. Did you mean"),
        ("prefill: {niceness: 20}", "prefill.niceness: 20 is neither auto nor a whole number from 0 to 19."),
        ("prefill: {niceness: low}", "prefill.niceness: low is neither auto nor a whole number from 0 to 19."),
        ("prefill: {niceness: -1}", "prefill.niceness: -1 is neither auto nor a whole number from 0 to 19."),
        ("prefill: {niceness: null}", "prefill.niceness: null is neither auto nor a whole number from 0 to 19."),
        ("prefill: {niceness: true}", "prefill.niceness: True is neither auto nor a whole number from 0 to 19."),
        ("prefill: {ordering: lifo}", "prefill.ordering must be 'edf' or 'fcfs', got 'lifo'."),
        ("kv_transfer: {transport: rdma}", "kv_transfer.transport must be 'grpc' or 'nixl', got 'rdma'."),
        ("kv_transfer: {shared_memory: always}", "kv_transfer.shared_memory must be 'auto' or 'off', got 'always'."),
        (
            "kv_transfer: {encoding: int4}",
            "kv_transfer.encoding must be 'native', 'int8' or 'auto', got 'int4'. Did you mean int8?",
        ),
        ("admission: {gather: true}", "unknown key admission.gather. Did you mean admission.gather_ms?"),
        ("admission: {gather_for: fun}", "admission.gather_for must be 'latency' or 'throughput', got 'fun'."),
        (
            "speculation: {draft_tokens: {suffix: 33}}",
            "speculation.draft_tokens.suffix must be less than or equal to 32",
        ),
        (
            "speculation: {draft_tokens: {medusa: 3}}",
            "speculation.draft_tokens.medusa must be 'draft_model', 'eagle', 'eagle3', 'ngram' or 'suffix'",
        ),
        (
            "speculation: {lookahead_window: 17}",
            "speculation.lookahead_window must be less than or equal to 16, got 17.",
        ),
        ("engine: {prefix_caching: 1}", "engine.prefix_caching must be true or false, got 1."),
        ("model: null", "model must be a valid string, got nothing (null)."),
        *(
            (
                f"speculation: {{draft: {text}}}",
                f"speculation.draft: {shown} is not a draft; expected none to disable drafts",
            )
            for text, shown in (
                ("null", "null"),
                ("'null'", "null"),
                ("false", "false"),
                ("off", "off"),
                ("None", "None"),
            )
        ),
        ("router: {api_keys: {alice: sk-alice}}", "router.api_keys must be a valid list, got something else."),
        ("ray: {address: 'head:99999'}", "'head:99999' is not an address"),
        ("speculation: {draft: ''}", "speculation.draft must have at least 1 character, got ''."),
        ("model: ''", "model must have at least 1 character, got ''."),
        ("prefill: {resources: {labels: {a: 1}}}", "prefill.resources.labels.a must be a valid string, got 1."),
        ("prefill: {resources: {gpus: 1.5}}", "prefill: resources.gpus is 1.5; give a fraction of one GPU, or a whole"),
        ("prefill: {resources: {gpus: 65}}", "prefill: resources.gpus is 65; give a fraction of one GPU, or a whole"),
        (
            "decode: {tensor_parallel: 4, resources: {gpus: 2}}",
            "decode: tensor_parallel is 4, but resources.gpus is 2; each process needs a GPU of its own",
        ),
        ("decode: {tensor_parallel: 2, resources: {gpus: 0.5}}", "set resources.gpus to 2, or leave tensor_parallel"),
        ("decode: {tensor_parallel: 0}", "decode.tensor_parallel must be greater than or equal to 1, got 0."),
        ("decode: {tensor_parallel: 65}", "decode.tensor_parallel must be less than or equal to 64, got 65."),
        (
            "decode: {tensor_parallel: 2}\nengine: {decoder: fused}",
            "engine: decoder: fused needs the fused decoder, which computes whole models only, but workers of decode",
        ),
        ("prefill: {resources: {gpus: 2}}\nengine: {weights: int8}", "engine: weights: int8 needs the fused decoder"),
        ("engine: {gpu_memory_utilization: 90}", "engine.gpu_memory_utilization"),
        ("engine: {gpu_memory_utilization: 0}", "engine.gpu_memory_utilization"),
        (
            "prefill: {kv_blocks: 9, kv_memory_gib: 1}",
            "prefill: kv_blocks and kv_memory_gib both set the size of the KV cache",
        ),
        ("engine: {weights: int8, decoder: transformers}", "weights: int8 needs decoder: fused or auto"),
        ("engine: {weights: int4, decoder: transformers}", "weights: int4 needs decoder: fused or auto"),
        ("engine: {weights: fp8, decoder: fused}", "weights: fp8 needs decoder: transformers or auto"),
        (
            "engine: {weights: int3}",
            "engine.weights must be 'native', 'dequantized', 'int8', 'int4' or 'fp8', got 'int3'.",
        ),
        (
            "engine: {kv_cache: int8}\nkv_transfer: {encoding: auto}",
            "kv_transfer.encoding must be native, got auto",
        ),
        ("engine: {kv_cache: fp8}", "engine.kv_cache must be 'native' or 'int8', got 'fp8'."),
        ("engine: {device: cuda}", "engine.device is cuda, but prefill.resources.gpus is 0"),
        (
            "autoscaler: {enabled: true}\ndecode: {workers: 48}",
            "decode.workers is 48, but autoscaler.decode allows 1 to 8",
        ),
        (
            "autoscaler: {enabled: true, prefill: {min: 2}}",
            "prefill.workers is 1, but autoscaler.prefill allows 2 to 8",
        ),
        ("kv_transfer: {connections: off}", "kv_transfer.connections: must be a number from 0 (none) to 16."),
        ("kv_transfer: {connections: 17}", "kv_transfer.connections must be less than or equal to 16, got 17."),
        ("kv_transfer: {max_bytes_per_second: .inf}", "kv_transfer.max_bytes_per_second must be a finite number"),
        ("router: {port: 1}\nrouter: {port: 2}", "duplicate key 'router'"),
        ("router: [", "is not valid YAML, line 1, column 10: while parsing a flow node, expected the node content"),
        ("router:\n  port: @", "is not valid YAML, line 2, column 9: while scanning for the next token, found"),
        ("router: \a", "is not valid YAML: unacceptable character"),
        ("- a", "must contain keys and values"),
        ("? [a]\n: 1", "is not valid YAML"),
        ("1: 2", "unknown key 1."),
        ("prefill: &p {workers: 1, x: *p}", "is not valid YAML: an alias refers to a mapping or list that contains it"),
        (
            "engine: {attention_backend: foo}",
            "engine.attention_backend must be 'auto', 'torch_sdpa' or 'triton_paged', got 'foo'.",
        ),
    ],
)
def test_a_wrong_configuration_is_explained(tmp_path, text, expected):
    message = error_for(tmp_path, text)
    assert expected in message
    assert str(tmp_path / "baton.yaml") in message


def test_no_message_quotes_a_key(tmp_path):
    for text in ("{alice: sk-alice}", "sk-alice", "[sk-alice]", "[{name: sk-alice, key: [sk-alice]}]"):
        assert "sk-alice" not in error_for(tmp_path, f"router: {{api_keys: {text}}}")


def test_all_faults_are_named_at_once(tmp_path):
    message = error_for(tmp_path, "router: {port: -1}\ndtype: int3\n")
    assert len(message.splitlines()) == 2


def test_a_fault_on_the_command_line_names_its_option(tmp_path):
    assert error_for(tmp_path, "dtype: auto", "router.prot=1").startswith("--set: unknown key router.prot.")
    assert error_for(tmp_path, "dtype: auto", "prefil.workers=1").startswith("--set: unknown key prefil.")


def test_overrides_take_precedence_over_the_file(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("router: {port: 1, host: localhost}\nprefill:\n", encoding="utf-8")
    overrides = dict(map(parse_override, ["router.port=2", "prefill.resources.labels={pool: a}", "log.json=true"]))
    config = load_config(file, overrides)
    assert (config.router.host, config.router.port) == ("localhost", 2)
    assert config.prefill.resources.labels == {"pool": "a"}
    assert config.log.json_lines is True


def test_an_empty_file_and_empty_sections_give_the_defaults(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("# nothing\n", encoding="utf-8")
    assert load_config(file) == BatonConfig()
    file.write_text("router:\nengine:\n", encoding="utf-8")
    assert load_config(file) == BatonConfig()


@pytest.mark.parametrize("text", ["router.port", "=1", ".port=1", "router..port=1", "a=[", "a={b: 1, b: 2}"])
def test_an_unreadable_override_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        parse_override(text)


def test_an_override_inside_a_plain_value_is_refused(tmp_path):
    assert "--set model.name: model is 'a/b'" in error_for(tmp_path, "model: a/b", "model.name=x")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read the configuration \S+none.yaml: No such file or directory\.$"):
        load_config(tmp_path / "none.yaml")


def test_a_local_model_is_resolved_from_the_folder_of_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "tiny").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = tmp_path / "deploy" / "baton.yaml"
    file.write_text("model: ./tiny\n", encoding="utf-8")
    assert load_config(file).model == str(tmp_path / "deploy" / "tiny")


@pytest.mark.parametrize("model", ["./none", "/none/such", "~/none-such", "none.gguf"])
def test_a_missing_local_model_is_an_error(model):
    with pytest.raises(ConfigError, match=r"is a local path, but there is no .* Correct the path\."):
        load_config(overrides={"model": model})


def test_hub_ids_and_the_default_name_are_kept(tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_config(overrides={"model": "organization/name"}).model == "organization/name"
    assert load_config().model == "smollm2-135m-instruct"


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000.0), ("2.5E2", 250.0), ("1.0e+3", 1000.0)])
def test_powers_of_ten_are_numbers(text: str, value: float, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"router:\n  request_timeout_s: {text}\n", encoding="utf-8")
    for config in (load_config(file), load_config(None, dict([parse_override(f"router.request_timeout_s={text}")]))):
        assert config.router.request_timeout_s == value


@pytest.mark.parametrize(
    "key", ["admission.mode", "kv_transfer.shared_memory", "engine.cuda_graphs", "engine.overlap_scheduling"]
)
def test_off_is_read_as_a_word(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    file = tmp_path / "baton.yaml"
    file.write_text(f"{section}:\n  {name}: off\n", encoding="utf-8")
    for config in (load_config(file), load_config(None, dict([parse_override(f"{key}=off")]))):
        assert getattr(getattr(config, section), name) == "off"


def test_booleans_are_true_and_false(tmp_path: Path) -> None:
    assert load_config(None, dict([parse_override("autoscaler.enabled=true")])).autoscaler.enabled
    assert "must be true or false, got 'on'" in error_for(tmp_path, "autoscaler:\n  enabled: on\n")


@pytest.mark.parametrize(
    ("values", "has_draft", "obstacle"),
    [
        ({}, True, ""),
        ({"prefill": {"kv_blocks": 100}}, True, "KV caches of different sizes"),
        ({"prefill": {"kv_blocks": 100}, "decode": {"kv_blocks": 100}}, True, ""),
        ({"decode": {"kv_memory_gib": 2.0}}, True, "KV caches of different sizes"),
        ({"decode": {"resources": {"cpus": 2.0}}}, True, "a process cannot change its Ray resources"),
        ({"speculation": {"draft_on_prefill": False}}, True, "speculation.draft_on_prefill"),
        ({"speculation": {"draft_on_prefill": False}}, False, ""),
        ({"simulation": {"profile": "h100-8b"}}, True, "simulated workers"),
    ],
)
def test_the_obstacle_to_a_role_change_is_named(values: dict[str, object], has_draft: bool, obstacle: str):
    said = BatonConfig.from_dict(values).role_change_obstacle(has_draft=has_draft)
    assert obstacle in said
    assert bool(said) == bool(obstacle)


@pytest.mark.parametrize(
    ("given", "names"), [(None, ()), ("gpt-4o", ("gpt-4o",)), (["mine", "gpt-4o"], ("mine", "gpt-4o"))]
)
def test_a_model_may_have_several_names(given: object, names: tuple[str, ...]) -> None:
    assert BatonConfig.from_dict({"served_model_name": given}).served_model_names == names


@pytest.mark.parametrize("given", [[], ["a", "a"], [""], 5])
def test_names_of_the_model_are_checked(given: object) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        BatonConfig.from_dict({"served_model_name": given})


def test_workers_wait_for_the_nodes_of_a_cloud_but_not_on_a_ray_without_others() -> None:
    waits = [AutoscalerConfig().to_limits(is_local=is_local).place_timeout_s for is_local in (True, False)]
    assert waits == [60.0, 1200.0]
    assert AutoscalerConfig.model_validate({"place_timeout": "5min"}).to_limits(is_local=True).place_timeout_s == 300.0


def test_only_pools_of_the_autoscaler_may_be_empty() -> None:
    pools = {"prefill": {"min": 0}}
    assert AutoscalerConfig.model_validate({"enabled": True, **pools}).waking_pools == {"prefill"}
    assert AutoscalerConfig.model_validate(pools).waking_pools == frozenset()
