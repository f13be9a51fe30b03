"""The inference engine: model, paged KV cache, scheduler and sampler. Independent of Ray and gRPC."""
