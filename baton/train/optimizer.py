"""AdamW over float32 copies of the weights, so that a head that computes in bfloat16 can make small updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BETAS = (0.9, 0.95)


class MasterAdamW:
    """Optimises the parameters of a network, of any dtype, that require gradients.

    Args:
        initial: float32 weights by parameter name, which replace the network's own.
        max_grad_norm: the norm to which gradients are clipped.
    """

    def __init__(
        self, network: nn.Module, initial: dict[str, torch.Tensor], weight_decay: float, max_grad_norm: float
    ) -> None:
        self._network = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        self._masters = {
            name: nn.Parameter(initial[name].detach().to(parameter.device, torch.float32, copy=True))
            for name, parameter in self._network.items()
        }
        self._max_grad_norm = max_grad_norm
        # Weight decay would shift the scale of norms.
        decayed = [weight for weight in self._masters.values() if weight.ndim > 1]
        others = [weight for weight in self._masters.values() if weight.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, fused=True)
        self._copy_to_network()

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Updates the weights by the network's gradients and clears these.

        Returns:
            The norm of all gradients before clipping.
        """
        for name, parameter in self._network.items():
            gradient = parameter.grad
            self._masters[name].grad = None if gradient is None else gradient.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters.values(), self._max_grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._copy_to_network()
        return float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """The float32 weights by parameter name."""
        return {name: weight.detach() for name, weight in self._masters.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state for :meth:`load_state_dict`."""
        return {"weights": self.weights(), "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of another optimizer."""
        for name, weight in self._masters.items():
            weight.copy_(state["weights"][name])
        self._adamw.load_state_dict(state["adamw"])
        self._copy_to_network()

    def _copy_to_network(self) -> None:
        with torch.no_grad():
            for name, parameter in self._network.items():
                parameter.copy_(self._masters[name])


def learning_rate_at(progress: float, step: int, highest: float, warmup_steps: int) -> float:
    """The learning rate: rises over the first steps, then falls linearly to 0.

    Args:
        progress: progress of the training, from 0 to 1.
    """
    return highest * min(1.0, (step + 1) / warmup_steps) * max(0.0, 1.0 - progress)
