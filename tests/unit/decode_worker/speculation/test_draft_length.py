"""How many tokens are drafted and verified, from what they cost and how often they are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from baton.core.drafts import Draft
from baton.core.step_costs import StepSample
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.draft_length import DraftingPolicy, DraftPasses, VerificationPolicy
from decode_worker.speculation.method import Outlook


def guess(confidences: Sequence[float]) -> Draft:
    return Draft(tuple(range(len(confidences))), confidences=tuple(confidences))


def record(costs: StepCostModel, num_sequences: int, num_tokens: int, ms: float) -> None:
    """A step of some sequences, whose further tokens are drafts."""
    costs.measured(StepSample(ms, 0, 0, num_sequences, num_sequences, 0, num_tokens - num_sequences, 0))


class TestDraftLength:
    def cost(self, slope: float) -> StepCostModel:
        cost = StepCostModel()
        for _ in range(8):
            for num_tokens in (1, 2, 4, 8, 16, 32, 64):
                record(cost, 1, num_tokens, 20.0 * (1 + slope * (num_tokens - 1)))
        return cost

    def test_cheap_verification_takes_all_good_drafts(self) -> None:
        policy = VerificationPolicy(self.cost(0.01))
        assert policy.choose({"a": guess([0.9] * 8)}, (), num_sequences=1, num_tokens=1) == {"a": 8}

    def test_expensive_verification_takes_none(self) -> None:
        policy = VerificationPolicy(self.cost(1.0))
        assert policy.choose({"a": guess([0.5] * 8)}, (), num_sequences=1, num_tokens=1) == {}

    def test_the_most_likely_slots_of_the_batch_come_first(self) -> None:
        policy = VerificationPolicy(self.cost(0.12))
        lengths = policy.choose(
            {"sure": guess([0.95] * 4), "vague": guess([0.1] * 4)}, (), num_sequences=2, num_tokens=2
        )
        assert lengths == {"sure": 4}

    def test_drafts_of_a_few_sequences_do_not_slow_down_the_others(self) -> None:
        """Tokens per millisecond would grow by 12 %, for one of sixteen; fifteen would wait 19 % longer for theirs."""
        cost = StepCostModel()
        for num_tokens in (16, 24):
            record(cost, 16, num_tokens, 35.0 if num_tokens == 16 else 41.5)
        policy = VerificationPolicy(cost)
        assert policy.choose({"a": guess([0.85] * 8)}, (), num_sequences=16, num_tokens=16) == {}
        lengths = policy.choose({str(name): guess([0.85]) for name in range(8)}, (), num_sequences=16, num_tokens=16)
        assert lengths == {str(name): 1 for name in range(8)}

    def test_large_batches_rarely_try_drafts_that_never_pay(self) -> None:
        policy = VerificationPolicy(self.cost(1.0))
        assert not any(policy.is_settled(32) for _ in range(100))
        for _ in range(16):
            policy.choose({}, (), num_sequences=32, num_tokens=32)
        assert [policy.is_settled(32) for _ in range(16)] == ([True] * 7 + [False]) * 2
        assert [policy.is_settled(9) for _ in range(6)] == [True, True, False] * 2
        assert not any(policy.is_settled(3) for _ in range(20))

    def test_drafts_that_pay_are_tried_in_every_step_again(self) -> None:
        policy = VerificationPolicy(self.cost(0.01))
        for _ in range(20):
            policy.choose({}, (), num_sequences=32, num_tokens=32)
        assert policy.is_settled(32)
        assert policy.choose({str(name): guess([0.9] * 4) for name in range(32)}, (), num_sequences=32, num_tokens=32)
        assert not any(policy.is_settled(32) for _ in range(20))

    def test_steps_that_verify_other_drafts_are_not_idle(self) -> None:
        policy = VerificationPolicy(self.cost(0.01))
        for _ in range(40):
            policy.choose({}, (), num_sequences=32, num_tokens=32, is_drafting=True)
        assert not policy.is_settled(32)

    def test_a_draft_is_shortened_to_a_prefix(self) -> None:
        policy = VerificationPolicy(self.cost(0.02))
        lengths = policy.choose({"a": guess([1.0, 1.0, 0.0, 1.0])}, (), num_sequences=1, num_tokens=1)
        assert lengths == {"a": 2}

    def test_a_small_gain_starts_no_speculation_but_can_continue_it(self) -> None:
        policy = VerificationPolicy(self.cost(0.1))
        barely = {"a": guess([0.133])}
        assert policy.choose(barely, (), num_sequences=1, num_tokens=1) == {}
        assert policy.choose({"a": guess([0.9])}, (), num_sequences=1, num_tokens=1) == {"a": 1}
        assert policy.choose(barely, (), num_sequences=1, num_tokens=1) == {"a": 1}


class TestDraftingForANetwork:
    def policy(self, pass_ms: float) -> tuple[DraftingPolicy, DraftPasses]:
        cost = StepCostModel()
        for num_sequences in (1, 2, 4, 8, 16):
            for num_tokens in (1, 2, 4, 8, 16, 32, 64):
                if num_tokens >= num_sequences:
                    record(cost, num_sequences, num_tokens, 20.0 + 0.5 * num_tokens)
        passes = DraftPasses(cost)
        for _ in range(8):
            passes.record(1, pass_ms)
        return DraftingPolicy(cost, passes), passes

    def test_profitable_drafting_runs_and_raises_the_bar_for_more_passes(self) -> None:
        policy, passes = self.policy(2.0)
        assert policy.choose(Outlook({"a": (0.6, 0.4, 0.2)}), (), num_sequences=1, num_tokens=1) == {"a"}
        assert passes.rate is not None
        assert passes.rate > 1 / 20.5
        assert passes.another([0.9])
        assert not passes.another([0.05])

    def test_unprofitable_passes_are_not_run(self) -> None:
        policy, _ = self.policy(30.0)
        assert policy.choose(Outlook({"a": (0.6, 0.4, 0.2)}), (), num_sequences=1, num_tokens=1) == set()

    def test_one_good_pass_is_enough(self) -> None:
        """What deeper drafts would waste does not speak against the first one."""
        policy, _ = self.policy(4.0)
        assert policy.choose(Outlook({"a": (0.5, 0.0, 0.0, 0.0)}), (), num_sequences=1, num_tokens=1) == {"a"}

    def test_requests_whose_drafts_fail_are_left_out(self) -> None:
        policy, _ = self.policy(2.0)
        outlook = Outlook({"bad": (0.01, 0.0), "good": (0.9, 0.8)})
        assert policy.choose(outlook, (), num_sequences=2, num_tokens=2) == {"good"}

    def test_a_request_that_names_the_method_gets_it_at_any_cost(self) -> None:
        policy, passes = self.policy(30.0)
        outlook = Outlook({"a": (0.1, 0.0), "b": (0.9, 0.8)})
        assert policy.choose(outlook, {"a"}, num_sequences=2, num_tokens=2) >= {"a"}
        assert passes.rate is not None

    def test_many_drafts_with_little_gain_are_rejected(self) -> None:
        policy, _ = self.policy(2.0)
        gains = {"a": (0.4, 0.2)}
        assert policy.choose(Outlook(gains, nodes_per_pass=1.0), (), num_sequences=1, num_tokens=1) == {"a"}
        assert policy.choose(Outlook(gains, nodes_per_pass=30.0), (), num_sequences=1, num_tokens=1) == set()

    def test_drafts_that_are_never_worth_verifying_become_rare(self) -> None:
        policy, _ = self.policy(2.0)
        outlook = Outlook({"a": (0.9, 0.8)})
        num_made = 0
        for _ in range(300):
            if not policy.is_settled(1) and policy.choose(outlook, (), num_sequences=1, num_tokens=1):
                num_made += 1
                policy.book(verified=False)
        assert num_made < 15
        while policy.is_settled(1):
            pass
        assert policy.choose(outlook, (), num_sequences=1, num_tokens=1) == {"a"}
        policy.book(verified=True)
        assert not policy.is_settled(1)

    def test_a_refusal_lasts_for_a_few_steps(self) -> None:
        policy, _ = self.policy(2.0)
        assert not policy.is_settled(1)
        policy.choose(Outlook({"a": (0.01,)}), (), num_sequences=1, num_tokens=1)
        assert [policy.is_settled(1) for _ in range(4)] == [True, True, True, False]
        assert policy.choose(Outlook({"a": (0.9, 0.8)}), (), num_sequences=1, num_tokens=1) == {"a"}
        assert not policy.is_settled(1)

    def test_a_refusal_is_probed_periodically(self) -> None:
        policy, _ = self.policy(2.0)
        outlook = Outlook({"a": (0.05, 0.0)})
        chosen = [not policy.is_settled(1) and policy.choose(outlook, (), 1, 1) for _ in range(640)]
        assert 6 <= sum(map(bool, chosen)) <= 8
        assert sum(map(bool, chosen[:160])) >= 2
        assert any(first and second for first, second in pairwise(chosen)), "the first pass after a pause is a cold one"
        assert policy.num_kept_rows != 1

    def test_drafting_that_would_not_pay_even_with_good_drafts_is_rarely_probed(self) -> None:
        policy, _ = self.policy(30.0)
        outlook = Outlook({"a": (0.05, 0.0)})
        chosen = [not policy.is_settled(1) and policy.choose(outlook, (), 1, 1) for _ in range(2100)]
        assert sum(map(bool, chosen)) == 4
        assert policy.num_kept_rows == 1

    def test_a_smaller_batch_is_reconsidered_at_once(self) -> None:
        policy, _ = self.policy(30.0)
        outlook = Outlook({"a": (0.05, 0.0)})
        for _ in range(5):
            while policy.is_settled(32):
                pass
            policy.choose(outlook, (), 32, 32)
        assert [policy.is_settled(count) for count in (32, 30, 24, 23)] == [True, True, True, False]

    def test_cold_passes_do_not_count_against_a_network(self) -> None:
        passes = DraftPasses(StepCostModel())
        for ms in (5000.0, 80.0, 40.0):
            passes.record(1, ms)
        assert passes.ms(1) == 0.0
        for _ in range(3):
            passes.record(1, 2.0)
        assert passes.ms(1) == pytest.approx(2.0, rel=1e-3)

    def test_after_some_steps_without_drafts_little_is_reserved_for_them(self) -> None:
        policy, _ = self.policy(2.0)

        def step(gain: float) -> int | None:
            if not policy.is_settled(1):
                policy.choose(Outlook({"a": (gain, gain)}), (), 1, 1)
            return policy.num_kept_rows

        assert [step(0.05) for _ in range(15)] == [None] * 15
        kept = step(0.05)
        assert kept is not None
        assert kept > 1
        while step(0.9) is not None:
            pass
        assert step(0.9) is None
