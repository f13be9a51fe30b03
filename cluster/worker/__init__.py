"""The process in which a role runs. In the control plane, only this package may import torch."""
