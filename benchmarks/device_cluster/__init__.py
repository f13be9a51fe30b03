"""Runs the whole product on one GPU: a router, and a prefill and a decode worker that share the GPU."""
