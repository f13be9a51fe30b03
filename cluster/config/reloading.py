"""Which changes of the configuration a running cluster takes over at once."""

from __future__ import annotations

from cluster.config.config import BatonConfig
from cluster.config.key_changes import Need, changed_keys, need_of


def reloaded(running: BatonConfig, new: BatonConfig) -> BatonConfig:
    """The running configuration with the API keys and SLO classes of the new one."""
    router = running.router.model_copy(update={"api_keys": new.router.api_keys})
    return running.model_copy(update={"router": router, "slo": new.slo})


def restart_keys(running: BatonConfig, new: BatonConfig) -> list[str]:
    """The dotted keys that differ and that a reload does not take over."""
    return [key for key in changed_keys(running, new) if need_of(key) is not Need.RELOAD]
