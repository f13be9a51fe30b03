"""Structured logs."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.config import LogConfig
from cluster.logs import JsonFormatter, configure_logging

PACKAGES = ("engine", "cluster", "prefill_worker", "decode_worker")


@pytest.fixture(autouse=True)
def _restore():
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_json_line_says_who_and_when(capsys):
    configure_logging(LogConfig(level="info", json=True), "decode-1")
    logging.getLogger("cluster.router").info("request %s ended", "r1")
    line = json.loads(capsys.readouterr().err)
    assert line["message"] == "request r1 ended"
    assert (line["process"], line["level"], line["logger"]) == ("decode-1", "info", "cluster.router")
    assert line["time"].endswith("+00:00")


def test_an_exception_stays_on_its_line(capsys):
    configure_logging(LogConfig(json=True), "router")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("engine").exception("failed")
    [text] = capsys.readouterr().err.splitlines()
    assert "two\nlines" in json.loads(text)["exception"]


def test_text_lines_name_the_process(capsys):
    configure_logging(LogConfig(), "controller")
    logging.getLogger("cluster.controller").warning("careful")
    assert "WARNING controller cluster.controller: careful" in capsys.readouterr().err


def test_the_level_is_kept(capsys):
    configure_logging(LogConfig(level="error"), "router")
    logging.getLogger("cluster").warning("not shown")
    assert capsys.readouterr().err == ""


def test_configuring_again_does_not_double_lines(capsys):
    for _ in range(2):
        configure_logging(LogConfig(), "router")
    logging.getLogger("cluster").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_what_cannot_be_json_is_shown_all_the_same():
    record = logging.LogRecord("engine", logging.INFO, "", 0, "%r", (object(),), None)
    assert "object object at" in json.loads(JsonFormatter("p").format(record))["message"]
