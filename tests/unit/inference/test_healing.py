import pytest

from streams.inference.healing import FAILURES, LONGEST_PAUSE_S, PAUSE_S, Healing, Probed
from streams.ports import Recovery


def probed(*outcomes: Probed) -> Healing:
    state = Healing()
    for outcome in outcomes:
        state = state.after_probe(outcome)
    return state


A, L, R, F = Probed.ANSWERED, Probed.LATE, Probed.REFUSED, Probed.FAILED


@pytest.mark.parametrize(
    ("outcomes", "is_due"),
    [((), False), ((F,), False), ((F, F), True), ((F, A, F), False), ((F, R, F), False), ((F, L, F), True)],
)
def test_a_model_is_brought_back_after_failures_in_a_row(outcomes: tuple[Probed, ...], is_due: bool):
    assert probed(*outcomes).is_due(0.0) is is_due


def test_a_model_that_is_only_slow_is_never_brought_back():
    assert not probed(*[L] * 99).is_due(0.0)


def test_a_server_that_is_away_is_waited_for_without_counting_against_the_model():
    state = probed(*[F] * FAILURES).after_recovery(Recovery.AWAY, now_s=7.0)

    assert not state.is_due(7.0)
    assert state.may_try(7.0), "it may be back at any moment"
    assert state.after_probe(F).after_probe(F).is_due(7.0)


@pytest.mark.parametrize("recovery", [Recovery.UNNEEDED, Recovery.LOADED, Recovery.HEALED])
def test_after_an_attempt_that_helped_two_more_failures_and_a_pause_are_needed(recovery: Recovery):
    state = probed(F, F).after_recovery(recovery, now_s=100.0)

    assert not state.after_probe(F).is_due(100.0 + PAUSE_S)
    again = state.after_probe(F).after_probe(F)
    assert not again.is_due(99.9 + PAUSE_S)
    assert again.is_due(100.0 + PAUSE_S)


def test_what_does_not_help_is_tried_ever_less_often():
    state, pauses = probed(F, F), []
    for _ in range(6):
        state = state.after_recovery(Recovery.FAILED, now_s=0.0).after_probe(F)
        pauses.append(state.not_before_s)
        assert not state.is_due(pauses[-1] - 0.1)
        assert state.is_due(pauses[-1])

    assert pauses == [10.0, 20.0, 40.0, *[LONGEST_PAUSE_S] * 3]


def test_a_model_that_answered_in_between_is_tried_soon_again():
    state = probed(F, F).after_recovery(Recovery.FAILED, now_s=0.0).after_probe(A)

    assert state.after_recovery(Recovery.FAILED, now_s=50.0).not_before_s == 60.0
