"""The inference engine: model, paged KV cache, scheduler and sampler. Knows nothing of Ray or gRPC."""
