"""What the processes of a cluster do without their controller, or without Ray's control store."""
