"""The control plane: router, pools, simulation and command line."""
