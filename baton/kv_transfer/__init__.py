"""The KV hand-off: contracts, wire codec and transports. Used by the workers; no KV passes through the router."""
