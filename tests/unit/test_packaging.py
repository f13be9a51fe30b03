"""Installed files, pinned versions, and consistency of the other project files with the code."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster.config.config import load_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "cluster", "decode_worker", "prefill_worker")
"""What is installed."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names_of(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


LOAD_TOOL = ROOT / "baton" / "bench"


def imported_packages(folder: Path, without: Path | None = None) -> set[str]:
    """Top-level names that the sources of a folder import, inside functions too."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        if without is not None and file.is_relative_to(without):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {*PACKAGES, "benchmarks", "tests"}


def undeclared(imported: set[str], declared: set[str]) -> set[str]:
    owners = metadata.packages_distributions()
    return {
        name for name in imported if not declared & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    }


def test_every_import_of_the_packages_is_a_declared_dependency():
    imported = set().union(*(imported_packages(ROOT / package, LOAD_TOOL) for package in PACKAGES))
    # The generator of the stubs is a tool of development; traces and kernels for GPUs need extras, and say so.
    extras = PROJECT["optional-dependencies"]
    declared = names_of(PROJECT["dependencies"] + extras["otel"] + extras["gpu"])
    assert undeclared(imported - {"grpc_tools"}, declared) == set()


def test_packages_imported_only_by_benchmarks_are_in_an_extra():
    extras = PROJECT["optional-dependencies"]
    declared = names_of(PROJECT["dependencies"] + extras["bench"] + extras["gpu"])
    imported = imported_packages(ROOT / "benchmarks") | imported_packages(LOAD_TOOL)
    assert undeclared(imported, declared) == set()


def test_every_import_of_the_tests_is_declared():
    declared = names_of(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
    for extra in ("otel", "gpu", "quantized"):  # which the extra "test" has
        declared |= names_of(PROJECT["optional-dependencies"][extra])
    by_hand = {"gptqmodel"}  # of tests.quantized.make_checkpoints; it needs another version of torch
    by_hand |= {"instructor", "langchain_anthropic", "langchain_openai", "litellm"}  # of tests.clients_by_hand
    by_hand |= {"lm_eval"}  # of tests.lm_eval_by_hand
    assert undeclared(imported_packages(ROOT / "tests") - by_hand, declared) == set()


def test_every_dependency_is_pinned_to_a_plain_version_that_satisfies_it():
    pins = pinned()
    requirements = [
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    ]
    for requirement in map(Requirement, requirements):
        if canonicalize_name(requirement.name) != "baton-serve":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins.values())
    assert pins["torch"] == "2.13.0"


def test_installed_versions_match_the_pinned_ones():
    pins = pinned()
    for name in names_of(PROJECT["dependencies"]):
        assert metadata.version(name).partition("+")[0] == pins[name], name


def test_neither_tests_nor_benchmarks_are_installed():
    from setuptools import find_packages

    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(ROOT), include=include)
    assert {package.split(".")[0] for package in packages} == set(PACKAGES)
    sources = {file.parent.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert {Path(*package.split(".")) for package in packages} == sources


def test_data_files_are_installed():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    installed = {
        file
        for package, patterns in tools["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in ROOT.glob(f"{package.replace('.', '/')}/{pattern}")
    }
    files = {file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()}
    assert {file for file in files if "assets" in file.parts or file.suffix == ".yaml"} <= installed


def test_the_command_is_installed():
    (command,) = metadata.entry_points(group="console_scripts", name="baton")
    assert command.value == "cluster.cli.command:main"


def test_the_license_matches_the_declaration():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_workers_start_without_the_extras():
    """A worker's modules load where pip installed no extra and torch, for CPUs, brought no Triton."""
    extras = ["triton", "nixl", "opentelemetry", "bitsandbytes", "compressed_tensors", "scipy", "aiohttp"]
    modules = ["cluster.worker.worker_host", "prefill_worker.role", "decode_worker.role", "cluster.controller.launch"]
    code = f"import sys\nsys.modules.update(dict.fromkeys({extras}))\nimport {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# --- deploy/ ---


@pytest.fixture
def ray_cluster() -> dict:
    return yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text(encoding="utf-8"))


def test_the_schema_of_ray_accepts_the_example_machines(ray_cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(ray_cluster))


def test_the_example_machines_satisfy_the_gpu_example(ray_cluster):
    config = load_config(ROOT / "deploy" / "gpu-cluster.yaml")
    assert ray_cluster["head_node_type"] in ray_cluster["available_node_types"]
    num_nodes = 0
    for name in ("prefill", "decode"):
        pool, node = config.pool(name), ray_cluster["available_node_types"][name]
        wanted = {**pool.resources.labels, "ray.io/accelerator-type": pool.resources.accelerator_type}
        assert wanted.items() <= node["labels"].items()
        assert pool.workers * pool.resources.gpus <= node["min_workers"] * node["resources"]["GPU"]
        assert pool.workers * pool.resources.cpus <= node["min_workers"] * node["resources"]["CPU"]
        num_nodes += node["max_workers"]
    assert num_nodes == ray_cluster["max_workers"]


def test_the_example_machines_run_the_pinned_ray(ray_cluster):
    text = (ROOT / "deploy" / "ray-cluster.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"ray(?:\[default\])?(?:==|:)(\d+\.\d+\.\d+)", text)) == {pinned()["ray"]}


# --- Makefile and CI ---


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, env=variables)


def test_make_lists_its_targets():
    listed = make("help").stdout
    for target in ("setup", "demo", "test", "lint", "proto", "format", "clean", "help"):
        assert f"make {target} " in listed


def test_an_old_python_is_refused_with_an_explanation(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    old.chmod(0o755)
    for python in (str(old), ""):
        result = make("setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
        assert result.returncode != 0
        assert "baton needs Python 3.11 or newer" in result.stderr
        assert not (tmp_path / "venv").exists()


def test_a_complete_environment_is_not_installed_again(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed-runtime", ".installed-test", ".installed-dev"):
        (tmp_path / name).touch()
    for target in ("demo", "test", "lint"):
        assert "pip install" not in make("-n", target, f"VENV={tmp_path}").stdout
    os.utime(tmp_path / ".installed-runtime", (0, 0))
    assert "pip install" in make("-n", "demo", f"VENV={tmp_path}").stdout


def test_ci_is_executable_and_runs_the_tests_last():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run([shutil.which("bash") or "bash", "-n", str(script)]).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert text.index("make lint") < text.index("make test")


def test_pre_commit_runs_the_tools_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for repo in config["repos"] for hook in repo["hooks"]] == [
        "ruff",
        "ruff-format",
        "mypy",
        "lint-imports",
    ]
