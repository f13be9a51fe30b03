"""The Ray of a machine: its token, folder and ports, and machines that join a cluster."""
