"""One command that runs the whole product on one GPU: a router, a prefill worker and a decode worker that share it."""
