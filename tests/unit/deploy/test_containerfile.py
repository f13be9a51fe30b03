"""The image's base can be pinned, and nothing else comes from a registry of images."""

from __future__ import annotations

import re

from tests.unit.deploy.deploy_files import DEPLOY

LINES = (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines()


def test_every_stage_begins_with_the_base_that_the_build_names():
    stages = [re.fullmatch(r"FROM (\S+)(?: AS (\S+))?", line) for line in LINES if line.startswith("FROM")]
    assert all(stages)
    names = {stage[2] for stage in stages if stage and stage[2]}
    assert {stage[1] for stage in stages if stage} - names == {"${BASE}"}


def test_the_base_is_an_argument_before_the_first_stage():
    """Only there is it visible in FROM."""
    (argument,) = (index for index, line in enumerate(LINES) if line.startswith("ARG BASE="))
    assert argument < next(index for index, line in enumerate(LINES) if line.startswith("FROM"))
