"""The units in deploy/systemd call commands that exist, and wait for them."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest

from cluster.cli.cli import run

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


def service_of(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_calls_a_command_that_exists(unit: Path) -> None:
    words = shlex.split(service_of(unit)["ExecStart"].replace("${BATON_HEAD}", "10.0.0.1:6379").replace("%i", "decode"))
    assert run([*words[1:], "--help"]) == 0  # after all other options are read


def test_systemd_waits_longer_than_a_node_drains() -> None:
    [unit] = [unit for unit in UNITS if unit.name.startswith("baton-node")]
    service = service_of(unit)
    words = shlex.split(service["ExecStart"])
    assert int(service["TimeoutStopSec"]) > int(words[words.index("--drain-timeout") + 1]) + 30
    assert {service_of(each)["KillMode"] for each in UNITS} == {"mixed"}  # Ray's processes end after their workers


def test_the_pages_commands_have_the_user_and_the_cache_of_the_units() -> None:
    page = (UNITS[0].parents[2] / "docs" / "machines.md").read_text()
    [found] = re.findall(r"^sudo -u (\w+) env HOME=(\S+) BATON_CACHE=(\S+) (\S+) status$", page, re.MULTILINE)
    user, home, cache, program = found
    for unit in UNITS:
        service = service_of(unit)
        assert (service["User"], shlex.split(service["ExecStart"])[0]) == (user, program)
        assert "Environment" not in service, "would set something that the page does not know of"
    assert f"--home-dir {home} {user}" in next(unit for unit in UNITS if "head" in unit.name).read_text()
    assert cache == f"{home}/.cache/baton"
