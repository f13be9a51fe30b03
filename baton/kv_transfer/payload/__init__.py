"""Payload paths, which move the bytes of KV: shared memory, TCP connections, NIXL, messages, or within one process."""
