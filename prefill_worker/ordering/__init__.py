"""Order of the prompts that wait for prefill: names of the policies of :mod:`baton.engine.scheduling.ordering`."""
