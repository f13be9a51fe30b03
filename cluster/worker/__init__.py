"""The process that a role runs in. Of the control plane, this package alone may import torch."""
