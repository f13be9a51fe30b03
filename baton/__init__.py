"""LLM serving in which prefill and decode run on separate pools: the library that every process shares."""
