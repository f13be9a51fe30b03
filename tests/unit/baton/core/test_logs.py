"""Structured logs."""

from __future__ import annotations

import json
import logging
import warnings

import pytest

from baton.core.logs import (
    PACKAGES,
    JsonFormatter,
    LogConfig,
    OccasionalLog,
    RequestLog,
    configure_logging,
    describe_fault,
)


@pytest.fixture(autouse=True)
def _restore():
    loggers = [logging.getLogger(name) for name in (None, "ray", *PACKAGES)]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_json_line_names_process_and_time(capsys):
    configure_logging(LogConfig(level="info", json=True), "decode-1")
    logging.getLogger("cluster.dispatch.router").info("request %s ended", "r1")
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == "request r1 ended"
    assert (line["process"], line["level"], line["logger"]) == ("decode-1", "info", "cluster.dispatch.router")
    assert line["time"].endswith("+00:00")


def test_json_logging_formats_lines_of_libraries_too(capsys):
    ray = logging.getLogger("ray")
    ray.propagate = False
    ray.addHandler(logging.StreamHandler())
    # A test of the same process may have started Ray, which then keeps its warnings to itself.
    ray.setLevel(logging.INFO)
    configure_logging(LogConfig(json=True), "router")
    logging.getLogger("asyncio").error("a task was lost")
    logging.getLogger("ray.worker").warning("a node left")
    warnings.warn("soon gone", DeprecationWarning, stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("asyncio", "error"),
        ("ray.worker", "warning"),
        ("py.warnings", "warning"),
    ]
    assert "soon gone" in lines[2]["message"]


def test_text_logging_keeps_the_handlers_of_libraries():
    before = list(logging.getLogger().handlers)
    configure_logging(LogConfig(), "router")
    assert logging.getLogger().handlers == before


def test_an_exception_stays_on_one_line(capsys):
    configure_logging(LogConfig(json=True), "router")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("baton.engine").exception("failed")
    [text] = capsys.readouterr().err.splitlines()
    assert "two\nlines" in json.loads(text)["exception"]


def test_text_lines_name_the_process(capsys):
    configure_logging(LogConfig(), "controller")
    logging.getLogger("cluster.controller.controller").warning("careful")
    assert "WARNING controller cluster.controller.controller: careful" in capsys.readouterr().err


def test_the_log_level_is_applied(capsys):
    configure_logging(LogConfig(level="error"), "router")
    logging.getLogger("cluster").warning("not shown")
    assert capsys.readouterr().err == ""


def test_configuring_twice_does_not_duplicate_lines(capsys):
    for _ in range(2):
        configure_logging(LogConfig(), "router")
    logging.getLogger("cluster").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_values_that_are_not_json_are_logged_as_text():
    record = logging.LogRecord("engine", logging.INFO, "", 0, "%r", (object(),), None)
    assert "object object at" in json.loads(JsonFormatter("p").format(record))["message"]


def test_fields_are_logged_with_the_message(capsys):
    configure_logging(LogConfig(level="info", json=True), "router")
    log = RequestLog(logging.getLogger("cluster.dispatch.router"), "chatcmpl-1")
    log.info("a request ended", extra={"outcome": "stop", "seconds": 1.5})
    line = json.loads(capsys.readouterr().err)
    assert (line["request_id"], line["outcome"], line["seconds"]) == ("chatcmpl-1", "stop", 1.5)
    assert line["message"] == "a request ended"


def test_text_lines_end_with_the_fields(capsys):
    configure_logging(LogConfig(level="info"), "router")
    RequestLog(logging.getLogger("cluster.dispatch.router"), "r1").info("ended", extra={"outcome": "stop"})
    assert capsys.readouterr().err.endswith("INFO router cluster.dispatch.router: ended [outcome=stop request_id=r1]\n")


def test_fields_cannot_replace_standard_ones(capsys):
    configure_logging(LogConfig(level="info", json=True), "router")
    names = ("time", "level", "logger", "message", "process", "name", "msg", "args")
    RequestLog(logging.getLogger("cluster"), "r1").info("said", extra=dict.fromkeys(names, "made up"))
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["level"], line["process"], line["logger"]) == ("said", "info", "router", "cluster")
    assert line["time"] != "made up"
    assert line["name_"] == "made up"


def test_attributes_added_by_libraries_are_not_fields():
    record = logging.LogRecord("engine", logging.INFO, "", 0, "said", (), None)
    record._ray_timestamp_ns = 1
    assert "timestamp_ns" not in JsonFormatter("p").format(record)


def test_an_event_is_one_line(capsys):
    configure_logging(LogConfig(), "router")
    logging.getLogger("cluster").warning("a peer said %s", "first\nWARNING second")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_fault_is_described_without_its_message():
    try:
        raise ValueError("the prompt was: my secret")
    except ValueError as error:
        described = describe_fault(error)
    assert "secret" not in described
    assert described.startswith("ValueError in test_a_fault_is_described_without_its_message (")


FORGED = "a\n2026-01-01 00:00:00 CRITICAL router baton: FAKE\r\x1b[31m\x85\u2028\u202e\ud800\x00"


@pytest.mark.parametrize("place", ["message", "argument", "field", "field's name", "exception"])
def test_no_text_of_a_client_makes_a_line_of_its_own(capsys, place):
    configure_logging(LogConfig(level="info"), "router")
    log = logging.getLogger("cluster")
    if place == "message":
        log.info(FORGED)
    elif place == "argument":
        log.info("said %s", FORGED)
    elif place == "field":
        RequestLog(log, FORGED).info("said")
    elif place == "field's name":
        log.info("said", extra={FORGED: 1})
    else:
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("failed")
    first, *more = capsys.readouterr().err.splitlines()
    assert "INFO router cluster: " in first or "ERROR router cluster: failed" in first
    assert all(line.startswith("    ") for line in more)
    assert bool(more) is (place == "exception")
    assert "\n".join([first, *more]).replace("\n", "").isprintable()


def test_a_value_is_no_second_field(capsys):
    configure_logging(LogConfig(level="info"), "router")
    for value in ("r1 outcome=stop", "r1] [code=x", 'r"1', ""):
        RequestLog(logging.getLogger("cluster"), value).info("said")
        assert capsys.readouterr().err.endswith(f" said [request_id={json.dumps(value)}]\n")


def test_frequent_lines_are_left_out_and_counted(caplog):
    now_s = [0.0]
    log = OccasionalLog(logging.getLogger("cluster"), 10.0, lambda: now_s[0])
    for now_s[0] in (0.0, 1.0, 9.0, 10.0, 30.0):
        log.log(logging.WARNING, "again")
    assert [record.getMessage() for record in caplog.records] == [
        "again",
        "again (2 such lines were left out)",
        "again",
    ]
