"""The names of ``prefill.ordering``."""

from __future__ import annotations

from typing import get_args

import pytest

from baton.core.errors import ConfigError
from baton.engine.scheduling.ordering import ArrivalOrder, EarliestDeadlineFirst
from cluster.config.worker_config import PrefillConfig
from prefill_worker.ordering.registry import create_ordering


def test_every_configurable_policy_exists_and_deadline_is_the_default() -> None:
    kinds = {name: type(create_ordering(name)) for name in get_args(PrefillConfig.model_fields["ordering"].annotation)}
    assert kinds == {"edf": EarliestDeadlineFirst, "fcfs": ArrivalOrder}
    assert kinds[PrefillConfig().ordering] is EarliestDeadlineFirst


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lifo'.*edf, fcfs"):
        create_ordering("lifo")
