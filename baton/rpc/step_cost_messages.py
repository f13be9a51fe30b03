"""Conversions between a worker's step costs and ``StepCosts``."""

from __future__ import annotations

from baton.core.speculation_rates import RateSums, SpeculationRates
from baton.core.step_costs import StepCostReport, StepCosts
from baton.rpc.wire import worker_pb2


def pack_step_costs(report: StepCostReport) -> worker_pb2.StepCosts:
    message = worker_pb2.StepCosts(coefficients=report.costs, sd=report.sd, num_samples=report.num_samples)
    for size, sums in report.rates.sums.items():
        message.rates.add(size_class=size, decoding=sums.decoding, emitted=sums.emitted, drafted=sums.drafted)
    return message


def unpack_step_costs(message: worker_pb2.StepCosts) -> StepCostReport:
    """Raises :class:`ValueError` if the message does not describe costs."""
    if len(message.coefficients) != len(StepCosts._fields):
        raise ValueError(f"{len(message.coefficients)} step cost coefficients, expected {len(StepCosts._fields)}")
    rates = {rate.size_class: RateSums(rate.decoding, rate.emitted, rate.drafted) for rate in message.rates}
    return StepCostReport(StepCosts(*message.coefficients), message.sd, message.num_samples, SpeculationRates(rates))
