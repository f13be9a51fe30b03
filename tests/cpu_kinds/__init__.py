"""Runs tests as if on another kind of x86 CPU: instruction sets are masked, or their instructions are emulated."""
