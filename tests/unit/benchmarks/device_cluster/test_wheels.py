"""Wheels in pieces: cut, joined and installed without an index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.device_cluster import __main__ as command
from benchmarks.device_cluster.wheels import WheelsError, cut, install, join

NAME = "tiny_thing-1.0-py3-none-any.whl"


def write_wheel(folder: Path) -> bytes:
    """A wheel with one module; stored without compression, so that its size is known to exceed a few hundred bytes."""
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("tiny_thing.py", f"ANSWER = 42\n{'#' * 2000}\n")
        wheel.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    return (folder / NAME).read_bytes()


def test_wheels_have_the_versions_in_the_constraints() -> None:
    """Versions equal those of ``constraints.txt`` wherever it pins one."""
    root = Path(__file__).parents[4]
    pinned = dict(line.split("==") for line in lines_of(root / "constraints.txt"))
    for file in ("benchmarks/device_run/wheels.txt", "benchmarks/device_cluster/wheels.txt"):
        carried = dict(line.split("==") for line in lines_of(root / file))
        names = {name.replace("_", "-"): version for name, version in carried.items()}
        assert {name: pinned[name] for name in names if name in pinned} == {
            name: version for name, version in names.items() if name in pinned
        }
        assert len(names.keys() & pinned.keys()) > 4


def lines_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.lower().replace("_", "-") for line in lines if "==" in line and not line.startswith("#")]


def test_a_large_wheel_is_split_and_rejoins_to_the_same_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    whole = write_wheel(source)
    cut(source, piece_bytes=1000)
    pieces = sorted(path.name for path in source.iterdir())
    assert pieces == [*(f"{NAME}.part{number}" for number in range(-(-len(whole) // 1000))), f"{NAME}.pieces"]
    assert max(path.stat().st_size for path in source.iterdir()) == 1000
    [joined] = join(source, target)
    assert (joined.name, joined.read_bytes()) == (NAME, whole)


def test_a_small_wheel_stays_whole(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    cut(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("missing", ["part1", "part2", "pieces"])
def test_a_missing_piece_is_named(tmp_path: Path, missing: str) -> None:
    write_wheel(tmp_path)
    cut(tmp_path, piece_bytes=1000)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{NAME}.{end}" for end in ("part0", "part1", "part2", "pieces")
    }
    (tmp_path / f"{NAME}.{missing}").unlink()
    with pytest.raises(WheelsError, match=rf"{tmp_path} lacks {NAME}\.{missing}\. Run: make device-wheels"):
        join(tmp_path, tmp_path)


def test_a_damaged_piece_is_detected(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    cut(tmp_path, piece_bytes=1000)
    (tmp_path / f"{NAME}.part2").write_bytes(b"half")
    with pytest.raises(WheelsError, match="is damaged"):
        join(tmp_path, tmp_path)


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelsError, match="contains no wheels"):
        install(tmp_path, tmp_path / "target")
    with pytest.raises(WheelsError, match="no such is not a folder"):
        install(tmp_path / "no such", tmp_path / "target")


def test_a_failed_install_is_not_mistaken_for_a_complete_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / NAME).write_bytes(b"no wheel")
    for _ in range(2):
        with pytest.raises(WheelsError, match=f"pip cannot install the wheels in {source}: .*{NAME}"):
            install(source, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("has_ray", [True, False])
def test_a_folder_without_the_needed_wheels_is_refused(
    tmp_path: Path, has_ray: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether Ray is installed or not, and although a wheel of something else could be installed."""
    monkeypatch.setattr(command, "find_spec", lambda name: object() if has_ray else None)
    monkeypatch.setattr(command, "install", lambda folder, target: folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    folder = tmp_path / "no such" if has_ray else tmp_path
    with pytest.raises(WheelsError, match=f"--wheels: {folder} (is not a folder|has no wheel of Ray)"):
        command._provide_ray(folder)
    monkeypatch.setattr(sys, "argv", ["device_cluster", "--out", str(tmp_path), "--wheels", str(folder)])
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert refused.value.code == 2
    assert str(folder) in capsys.readouterr().err


def test_installed_wheels_can_be_imported(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_wheel(source)
    cut(source, piece_bytes=1000)
    packages = install(source, tmp_path / "target")
    assert install(source, tmp_path / "target") == packages
    assert list((tmp_path / "target").iterdir()) == [packages]
    shutil.rmtree(source)
    source.mkdir()
    write_wheel(source)
    assert install(source, tmp_path / "target") != packages, "changed wheels are installed anew"
    code = f"import sys; sys.path.insert(0, {str(packages)!r}); import tiny_thing; print(tiny_thing.ANSWER)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"
