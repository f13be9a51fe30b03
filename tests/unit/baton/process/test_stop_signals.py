"""Signals abort a start at once and stop a running cluster by a flag, but never interrupt Ray's own start."""

import os
import signal
import sys
import threading
import time

import pytest

from baton.process import stop_signals
from baton.process.stop_signals import StopSignals, signals_deferred

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_a_signal_aborts_a_start(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@BOTH
def test_after_the_start_a_signal_sets_the_flag(number):
    with StopSignals() as signals:
        signals.end_of_start()
        assert not signals.stop.is_set()
        signal.raise_signal(number)
        assert signals.stop.is_set()
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("starting", [True, False])
def test_a_hangup_asks_for_a_reload(starting):
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals(on_hangup="reload") as signals:
        if not starting:
            signals.end_of_start()
        assert not signals.take_reload()
        signal.raise_signal(signal.SIGHUP)
        assert signals.take_reload()
        assert not signals.take_reload()
        assert not signals.stop.is_set()
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.timeout(20)
def test_a_slow_handler_does_not_make_a_wait_endless(monkeypatch):
    monkeypatch.setattr(stop_signals, "_has_terminal", lambda: bool(time.sleep(0.2)) or True)
    with StopSignals(on_hangup="reload") as signals:
        hangup = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGHUP))
        hangup.start()
        signals.stop.wait(0.1)
        hangup.join()
        while not signals.take_reload():
            assert not signals.stop.wait(0.1)


def test_a_closed_terminal_stops(monkeypatch):
    has_terminal = [True]
    monkeypatch.setattr(stop_signals, "_has_terminal", lambda: has_terminal[-1])
    with StopSignals(on_hangup="reload") as signals:
        signals.end_of_start()
        signal.raise_signal(signal.SIGHUP)
        assert signals.take_reload()
        has_terminal.append(False)
        signal.raise_signal(signal.SIGHUP)
        assert not signals.take_reload()
        assert signals.stop.is_set()


def test_a_hangup_is_left_alone_unless_it_reloads():
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals():
        assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.timeout(60)
def test_a_signal_on_any_line_of_waiting_sets_the_flag():
    """This holds even while the waiting code holds a lock, as threading.Event does."""
    lines_of_wait = 0
    while True:
        left = lines_of_wait

        def trace(frame, event, argument):
            nonlocal left
            if event == "line":
                left -= 1
                if left == -1:
                    signal.raise_signal(signal.SIGTERM)
            return trace

        with StopSignals() as signals:
            signals.end_of_start()
            sys.settrace(trace)
            try:
                signals.stop.wait(0.001)
            finally:
                sys.settrace(None)
            if left >= 0:  # the wait has fewer lines
                break
            assert signals.stop.is_set()
            assert signals.stop.wait(60)
        lines_of_wait += 1
    assert lines_of_wait > 2


def test_a_signal_wakes_waiting_tasks():
    with StopSignals() as signals:
        signals.end_of_start()
        waiting = [threading.Thread(target=signals.stop.wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        signal.raise_signal(signal.SIGTERM)
        for thread in waiting:
            thread.join(30)
        assert not any(thread.is_alive() for thread in waiting)
        assert signals.stop.wait(0)


@pytest.mark.parametrize("impatient", [True, False])
def test_a_second_ctrl_c_interrupts_only_if_impatient(impatient):
    with StopSignals(impatient=impatient) as signals:
        signals.end_of_start()
        signal.raise_signal(signal.SIGINT)
        if impatient:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)


@BOTH
def test_deferred_signals_reach_the_previous_handler_after_the_block(number):
    done: list[str] = []

    def start_ray() -> None:
        with signals_deferred():
            signal.raise_signal(number)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ray sets a handler of its own
            done.append("start")
        done.append("went on")

    with StopSignals(), pytest.raises(KeyboardInterrupt):
        start_ray()
    assert done == ["start"]


def exit_as_ray_does():
    """Ray sets such a handler when it starts, and one with status 1 once it has processes to end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    signal.raise_signal(signal.SIGTERM)


def test_a_handler_installed_in_the_block_that_exits_counts_as_a_signal():
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            exit_as_ray_does()
        assert signals.stop.is_set()


def terminate_as_ray_s_cpp_does():
    """Its handler, which stays installed until Python's handlers are restored."""
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10_000)


def test_an_abort_scheduled_by_sigterm_is_cancelled():
    left_s, handler = signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), StopSignals(), signals_deferred():
        terminate_as_ray_s_cpp_does()
    assert signal.getitimer(signal.ITIMER_REAL)[0] <= left_s
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_alarm_handler_outside_python_is_left_alone(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(KeyboardInterrupt), StopSignals(), signals_deferred():
        signal.raise_signal(signal.SIGTERM)


def test_an_exit_unhandled_by_the_previous_handler_is_raised():
    with StopSignals() as signals:
        signals.end_of_start()
        with pytest.raises(SystemExit), signals_deferred():
            exit_as_ray_does()
        assert signals.stop.is_set()


def test_an_error_in_the_block_restores_the_handlers():
    with StopSignals():
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(ValueError, match="broken"), signals_deferred():
            raise ValueError("broken")
        assert signal.getsignal(signal.SIGTERM) == handler


def test_other_threads_do_not_touch_signal_handlers():
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with signals_deferred():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
