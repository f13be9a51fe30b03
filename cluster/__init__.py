"""The control plane and everything distributed: router, pools, KV hand-off, command line."""
