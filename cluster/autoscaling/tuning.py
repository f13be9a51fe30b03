"""Constants of autoscaling and advice. Each comes with its unit and the reason for its value.

"Chosen" marks a value that follows neither from the design nor from a measurement.
"""

# Traffic: rates and growth.

HISTORY_S = 300
"""Seconds of traffic kept: enough for twenty requests of a class that sends four a minute."""
RATE_WINDOWS_S, RECENT_S = (60, 30, 20), 10
"""Seconds. The rate is that of the longest window that agrees with the last ``RECENT_S`` seconds, so a steady rate is
exact and a changed one is noticed within ten seconds."""
SIGNIFICANT_SDS = 3.0
"""Standard deviations beyond which the recent rate and the one before it differ."""
ENOUGH_ENDED = 20
"""Requests. With this many ended in the last window, their mean length counts alone."""
LOAD_SAMPLE_S = 1.0
"""Seconds between two samples of a pool's load."""
LOAD_SAMPLES = 15
"""Samples, one per ``LOAD_SAMPLE_S``, over which the growth of a pool's load is measured."""
SIGNIFICANT_GROWTH = 2.0
"""Growth over these samples, in square roots of the load, that is more than chance: two standard deviations of a
Poisson count."""
SMALLEST_RATE = 1e-9
"""Requests per second that count as zero, such as rounding errors."""

# Costs of workers.

REFERENCE_TOKENS, REFERENCE_BATCH = 256, 8
"""Tokens of a prompt, and sequences of a step, on which workers are compared. Chosen: a chat turn, a small batch."""
MIN_STEP_SAMPLES = 8
"""Smallest number of samples to trust. Even the profile of a slow worker at its start gives more than this."""

# Capacity of a pool.

MAX_UTILISATION = 0.9
"""Limit of planned utilisation, since arrivals come in bursts and queues grow fast beyond it."""
SMALLEST_ADDED_SHARE = 0.02
"""Smallest cost of a prompt in shared steps, as a share of its cost alone."""
SPILL_UTILISATION = 0.8
"""Utilisation up to which late prompts may spill to decode workers, about as many as were planned for them."""
HOPELESS_TPOT_FACTOR = 1.5
"""If a class misses its target even alone, the plan uses this multiple of its TPOT alone as the target."""
LARGEST_PROMPT_SHARE = 0.95
"""Share of a decode worker's time that prompts may take in a forecast, against division by zero."""

# Requirement: the size that a pool needs.

MIN_REQUESTS = 8
"""Requests that make a rate."""
ENOUGH_S = 120.0
"""Time after which fewer than ``MIN_REQUESTS`` requests also count as a measured rate."""
CLEAR_QUEUE_S = 15.0
"""Time in which queued work is to be cleared."""
LONGEST_LOOK_AHEAD_S = 30.0
"""Seconds. Growth is extrapolated no further, even if a worker takes longer to start."""
CHANCE_GROWTH = 0.14
"""Insignificant growth per second, in square roots of the load: two standard deviations in 14 s."""
QUEUE_SHARE = 0.5
"""Share of the most urgent TTFT target. A queue that takes longer is more than a fluctuation."""
SEARCH_FACTOR = 16
"""Multiple of the largest allowed size up to which the needed size is computed."""
CROWDED_PROMPTS = 2.0
"""Prompts per worker above which there is a queue, if costs are unknown."""

# Changes of size and of role.

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 60.0, 900.0
"""Seconds until the next attempt after a worker found no place. Doubles with each attempt. Chosen."""
DRAIN_FACTOR = 2.0
"""Ratio of the drain time to the mean work of a request, since a drain ends with the longest request."""
FIRST_ROLE_CHANGE_S = 3.0
"""Expected duration before the first role change."""
SMALLEST_LOCAL_SHARE = 0.02
"""Local share below which local prefill counts as disabled, since recovered requests are always computed locally."""
LOCAL_SHARE_STEPS = 64
"""Shares are multiples of 1/64."""

# Advice.

REQUESTS_FOR_ADVICE = 50
"""Requests before advice is given. Chosen: the lengths of fewer say little about a class."""
LOCAL_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Shares of prompts computed on decode workers that are compared with the present one."""
CLEAR_GAIN = 1.05
"""Ratio of capacities. Smallest gain that exceeds the accuracy of the model."""
CAPACITY_HALVINGS, LARGEST_DEMAND_FACTOR = 12, 1024.0
"""Capacity is searched between 1/1024 and 1024 times the demand, in so many halvings: to 0.4 %."""
TOKENS_PER_ROUND_WITH_DRAFTS = 1.02
"""Tokens per round above which there are drafts to judge."""
