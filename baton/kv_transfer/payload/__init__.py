"""How the bytes of KV travel: shared memory, connections, NIXL, or within one process."""
