"""Names of policies, as the configuration uses them. Whatever is added is added here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from cluster.routing.base import Filter, Picker, Scorer
from cluster.routing.filters.accepting import Accepting
from cluster.routing.filters.has_room import HasRoom
from cluster.routing.filters.untried import Untried
from cluster.routing.pickers.best_score import BestScore
from cluster.routing.pickers.power_of_two import PowerOfTwo
from cluster.routing.pickers.random_route import RandomRoute
from cluster.routing.pickers.round_robin import RoundRobin
from cluster.routing.scorers.kv_use import KVUse
from cluster.routing.scorers.least_loaded import LeastLoaded
from cluster.routing.scorers.predicted_tpot import PredictedTPOT
from cluster.routing.scorers.predicted_ttft import PredictedTTFT
from cluster.routing.scorers.prefix_affinity import PrefixAffinity
from cluster.routing.scorers.queue_depth import QueueDepth
from cluster.routing.scorers.slo_headroom import SLOHeadroom

FILTERS: Mapping[str, Callable[[], Filter]] = {
    "accepting": Accepting,
    "untried": Untried,
    "has_room": HasRoom,
}
"""In the order in which they are asked."""

SCORERS: Mapping[str, Callable[[], Scorer]] = {
    "slo_headroom": SLOHeadroom,
    "predicted_ttft": PredictedTTFT,
    "predicted_tpot": PredictedTPOT,
    "prefix_affinity": PrefixAffinity,
    "queue_depth": QueueDepth,
    "kv_use": KVUse,
    "least_loaded": LeastLoaded,
}

PICKERS: Mapping[str, Callable[[random.Random], Picker]] = {
    "best_score": lambda _: BestScore(),
    "power_of_two": PowerOfTwo,
    "round_robin": lambda _: RoundRobin(),
    "random": RandomRoute,
}
"""From the source of their randomness, if they need one."""
