"""The KV hand-off: contracts, wire codec and transports. Used by the workers; the router never sees a KV byte."""
