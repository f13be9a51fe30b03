"""Constants of admission. Each comes with its unit and the reason for its value.

"Chosen" marks a value that follows neither from the design nor from a measurement.
"""

# The queue.

QUEUE_TICK_S = 0.5
"""Seconds. Longest time between two looks at the queue, since predictions change and pauses of workers end without an
event."""
SHORTEST_PAUSE_S = 0.002
"""Seconds. Shortest time between two looks at the queue, since tokens and ends come in bursts."""
DISPATCHES_PER_TURN = 16
"""Requests. Dispatches in one turn of the event loop, so that the tokens of running requests do not wait for longer."""
WORKER_WAIT_TICK_S = 0.5
"""Seconds. Longest wait for a change of the workers: their pauses end without an event."""
LARGEST_CREDIT = 2.0
"""Requests. A class that other classes pass cannot save up more turns than this, so that no burst follows."""
CREDIT_ROUNDING = 1e-9
"""Requests. Credits are sums of floating-point shares; this much less than one request counts as one."""
EXPIRED_ENTRIES_KEPT = 64
"""Entries. Entries of requests that left are removed from the heap when there are more than this beyond twice the
queue's length, which keeps the cost of a removal constant."""

# Room: whether a request may start.

NEAR_SHARE = 0.5
"""Share of a limit. Only requests predicted above it teach the margin, since easy ones say nothing. Chosen."""
SHORTAGE_S, SHORTAGE_WAITING_S = 10.0, 2.0
"""Seconds. How long new and waiting lost requests step back after a request that could meet its targets found no
room. New ones for longer, since those that wait already would starve. Chosen."""
LONGEST_RETRY_S = 600.0
"""Seconds. Upper bound of ``Retry-After``, since predictions of longer waits are worthless. Chosen."""

# Waiting times.

SHORTEST_STAY_S = 1e-3
"""Seconds. Lower bound of a stay in a pool, against division by zero."""
STAY_WEIGHT = 0.05
"""Weight of a new stay in the mean: about the last twenty. Chosen."""

# Safety margins: the factor by which a prediction must stay below its target.

LARGEST_MARGIN = 3.0
"""Factor. Chosen: a prediction that is wrong by more is useless, and refusing more would not help."""
MARGIN_STEP = 0.06
"""Logarithm of the factor per miss: one miss raises the margin by 6 %. Chosen."""
MISS_SHARE_AIM = 0.75
"""Share of the allowed misses to aim at, since outcomes scatter around the aim."""
SMALLEST_MISS_SHARE = 0.005
"""Share. A stricter objective would need more than two hundred outcomes to learn anything."""
FIRST_SD = 0.08
"""Relative standard deviation of outcomes around predictions before any outcome is known."""
LATE_OUTCOME_RATIO = 1.3
"""Ratio of factors. Outcomes arrive late. If a request missed that was admitted with a factor smaller by this ratio,
the factor is not raised again but kept for longer."""
LARGEST_STAY = 2.0
"""Logarithm of the factor. Upper bound of what such misses add to the time that a factor is kept. Chosen."""

# Batching delay.

SHORTEST_DELAY_MS = 0.5
"""Milliseconds. A shorter delay is not worth a timer. Chosen."""
GAP_WEIGHT = 0.25
"""Weight of a new gap between arrivals in the mean: about the last four, since bursts are short. Chosen."""
LONGEST_GAP_MS = 1e3
"""Milliseconds. A pause of this length ends a burst; longer ones count as this long. Chosen."""
