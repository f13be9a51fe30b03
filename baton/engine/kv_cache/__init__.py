"""The paged KV cache: block ownership, prefix caching, tensors, and copies to and from the host."""
