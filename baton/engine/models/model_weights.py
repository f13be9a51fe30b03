"""Loads the weights of a model through transformers: as they are stored, or dequantized."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.models.model_source import ModelSource
from baton.engine.models.quantized.reader import INDEX, check_plain, checkpoint_files, plain_tensors
from baton.engine.models.quantized.schemes import Scheme, check_scheme, scheme_of

_FILES = ["*.json", "*.safetensors"]
_GENERATION_CONFIG = "generation_config.json"


def load_weights(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    weights: str = "native",
    divided: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Loads weights; for a GPU tensor by tensor, so that the host need not hold them and quantizers run there.

    Args:
        weights: ``native`` keeps a quantized checkpoint as it is stored, and transformers computes it. All other
            formats start from plain weights, which are computed from it.
        divided: how the ranks share the model; each of them loads its part.

    Raises:
        ConfigError: the checkpoint cannot be read, is not complete, or needs a library that is missing.
        UnsupportedModelError: the checkpoint is quantized in a way that cannot be dequantized, or not be divided.
    """
    disable_progress_bar()  # a progress bar does not belong in a log
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    if divided is not None:
        placement = {"distributed_config": divided}
    arguments = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, **placement}
    scheme = scheme_of(config)
    if scheme is not None:
        check_scheme(scheme, weights)
    if scheme is not None and weights != "native":
        return _load_dequantized(source, config, scheme, dtype, device, arguments)
    if scheme is not None:
        _check_native(scheme, divided is not None)
    elif Path(source.path).is_dir():
        check_plain(Path(source.path))
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = _complete(source, lambda: load(source.path, config=config, **arguments))
    if scheme is not None and model.dtype is not dtype:
        kept, asked = (str(name).removeprefix("torch.") for name in (model.dtype, dtype))
        raise ConfigError(
            f"the checkpoint is {scheme.name}, which transformers computes in {kept}, not in {asked}. "
            f"Set dtype: {kept}, or engine.weights: dequantized."
        )
    return model


def _load_dequantized(
    source: ModelSource,
    config: Any,
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    arguments: dict[str, Any],
) -> PreTrainedModel:
    folder = _local_folder(source)
    plain = _without_quantization(config)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with plain_tensors(folder, scheme, dtype, device) as tensors:
        model = _complete(
            source, lambda: model_class.from_pretrained(None, config=plain, state_dict=tensors, **arguments)
        )
    if (folder / _GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _check_native(scheme: Scheme, is_divided: bool) -> None:
    """Checks that transformers can compute a quantized checkpoint as it is stored."""
    remedy = "Set engine.weights: dequantized" if scheme.formats else ""
    if is_divided:
        raise UnsupportedModelError(
            f"the checkpoint is {scheme.name}, and quantized weights cannot be divided among ranks as they are stored. "
            f"{remedy or 'Take another checkpoint of the model'}, or a tensor-parallel degree of 1."
        )
    missing = [name for name in scheme.libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the checkpoint is {scheme.name}, which transformers computes with {' and '.join(missing)}, which is not "
            f"installed. Install it{', or s' + remedy[1:] if remedy else ''}."
        )
    # bitsandbytes would say in every product that it computes int8 in float16.
    logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)


def _complete(source: ModelSource, load: Callable[[], Any]) -> PreTrainedModel:
    """Loads a model and checks that no tensor is missing or misshapen; transformers fills those with random numbers."""
    try:
        loaded: Any = load()
    except (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"model: the weights of {source.name} could not be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    for name, stored, expected in sorted(loaded[1]["mismatched_keys"], key=str):
        raise ConfigError(
            f"model: {name} of {source.name} has the shape {tuple(stored)}, but its config needs {tuple(expected)}. "
            "Take the config.json that belongs to the checkpoint."
        )
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(
            f"model: the checkpoint of {source.name} lacks {len(missing)} of the weights of {type(model).__name__}, "
            f"such as {missing[0]}. Expected the complete checkpoint of a causal language model."
        )
    return model


def stored_bytes(source: ModelSource) -> int:
    """Bytes of a checkpoint's safetensors files, from its index where it is on a hub; 0 if they are not known."""
    folder = Path(source.path)
    if folder.is_dir():
        try:
            return sum(file.stat().st_size for file in checkpoint_files(folder))
        except (ConfigError, OSError):
            return 0
    try:
        index = json.loads(Path(hf_hub_download(source.path, INDEX)).read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, LookupError):
        return 0


def _local_folder(source: ModelSource) -> Path:
    """The folder of a checkpoint, after fetching a hub id."""
    if Path(source.path).is_dir():
        return Path(source.path)
    try:
        return Path(snapshot_download(source.path, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {source.name} could not be fetched from the hub: {error}. Check the name and the network."
        ) from error


def _without_quantization(config: Any) -> Any:
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain
