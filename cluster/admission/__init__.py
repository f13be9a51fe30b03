"""Admission control: dispatches, queues or refuses requests by predicted latency. See ``docs/admission.md``."""
