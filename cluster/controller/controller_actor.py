"""The controller as seen by the process of `baton up`: how it is created, and what an error of its calls means."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError, ConfigError, WorkerLostError
from baton.process.stop_signals import StopEvent
from baton.process.worker_environment import carried_variables
from cluster.config.config import BatonConfig
from cluster.controller.controller import Controller
from cluster.controller.ray_errors import has_failed_to_begin, short_reason
from cluster.controller.survivors import Survivors
from cluster.losses.orphan_watch import CONTROLLER_NAME

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LAST_CONTROLLER_S = 5.0
"""A controller whose `baton up` was killed ends in about a second."""
_UNKNOWN_S = 20.0
"""One that does not answer may be replaced by its own `baton up`."""


class ControllerLostError(WorkerLostError):
    """The controller's process has ended, rather than that it failed."""


def create_controller(config: BatonConfig, survivors: Survivors | None) -> Any:
    """Starts it on this node; returns its handle. Raises :class:`ConfigError` if there is one."""
    # On this node, where the user expects the endpoint; Ray may place an actor that needs no CPU on any node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(Controller).options(
        name=CONTROLLER_NAME,
        namespace=config.ray.namespace,
        num_cpus=0,
        max_concurrency=1000,
        scheduling_strategy=here,
    )
    try:
        return actor_class.remote(config.to_dict(), variables=carried_variables(), survivors=survivors)
    except ValueError as error:
        raise _already_runs(config.ray.namespace) from error


def await_no_controller(namespace: str, stop: StopEvent, must_wait: Callable[[], bool] = lambda: False) -> bool:
    """Waits for the end of a controller that is dying.

    Args:
        must_wait: called several times per second: whether what Ray says of the controller means nothing now, since a
            part of Ray does not answer.

    Returns:
        Whether there is none; False if ``stop`` is set before that is known.

    Raises:
        ConfigError: a controller lives.
    """
    began_s, answers = time.monotonic(), False
    while time.monotonic() < began_s + (_LAST_CONTROLLER_S if answers else _UNKNOWN_S):
        if must_wait():
            began_s = time.monotonic()
        try:
            controller = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
            ray.get(controller.pool_status.remote(), timeout=_LAST_CONTROLLER_S)
            answers = True
        except ValueError:
            return True
        except ActorDiedError:
            ray.kill(controller, no_restart=True)  # a GCS that was started again may not notice it by itself
        except (RayActorError, GetTimeoutError):
            logger.debug("Ray does not know yet what has become of the controller")
        if stop.wait(_POLL_S):
            return False
    raise _already_runs(namespace)


def is_loss(error: RayError) -> bool:
    """Whether the controller died, rather than failed: what it raises may be the death of a router."""
    is_of_process = isinstance(error, RayActorError) and not isinstance(error, RayTaskError)
    return is_of_process and not has_failed_to_begin(error)


def as_baton_error(error: RayError) -> BatonError:
    """What the controller raised, or what has become of it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BatonError):
        return cause
    kind = ControllerLostError if is_loss(error) else WorkerLostError
    return kind(f"The cluster's controller failed: {short_reason(error)}")


def _already_runs(namespace: str) -> ConfigError:
    return ConfigError(
        f"A baton cluster already runs in the Ray namespace {namespace!r}. "
        "Stop it with `baton down`, or choose another ray.namespace."
    )
