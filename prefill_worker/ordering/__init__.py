"""Order of the prompts that wait for prefill. One file per policy; the names are in ``registry.py``."""
