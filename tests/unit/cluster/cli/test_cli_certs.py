"""``baton certs``: certificates that the configuration takes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, StorageError
from baton.rpc.certificates import read_certificates
from cluster.cli.cli import run
from cluster.cli.cli_certs import create_certificates
from cluster.config.config import BatonConfig, load_config

SECRET = bytes(32)


def files(folder: Path, node: str) -> dict[str, str]:
    own = folder / node
    return {"ca": str(own / "ca.pem"), "certificate": str(own / "node.pem"), "key": str(own / "node.key")}


def test_the_files_of_each_node_are_what_the_configuration_reads(tmp_path: Path) -> None:
    assert run(["certs", str(tmp_path / "made"), "--node", "head", "--node", "gpu-1", "--days", "3"]) == 0
    for node in ("head", "gpu-1"):
        config = BatonConfig.from_dict({"security": files(tmp_path / "made", node)})
        assert config.security.credentials(SECRET).certificates is not None


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    create_certificates(tmp_path, ["head"], 1)
    for key in (tmp_path / "ca.key", tmp_path / "head" / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not (tmp_path / "head" / "ca.key").exists()


def test_repeating_it_adds_and_renews_nodes_of_the_same_authority(tmp_path: Path) -> None:
    create_certificates(tmp_path, ["head"], 1)
    first = (tmp_path / "head" / "node.pem").read_bytes()
    create_certificates(tmp_path, ["head", "late"], 1)
    assert (tmp_path / "head" / "node.pem").read_bytes() != first
    heads, lates = (read_certificates(*map(Path, files(tmp_path, node).values())) for node in ("head", "late"))
    assert heads.authority == lates.authority


@pytest.mark.parametrize("node", ["", "../up", "a/b", ".hidden", "a b", "x" * 64])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        create_certificates(tmp_path, [node], 1)
    assert list(tmp_path.iterdir()) == []


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    create_certificates(tmp_path, ["head"], 1)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca.key cannot be read: No such file or directory"):
        create_certificates(tmp_path, ["head"], 1)


def test_another_authoritys_key_is_refused(tmp_path: Path) -> None:
    create_certificates(tmp_path / "a", ["head"], 1)
    create_certificates(tmp_path / "b", ["head"], 1)
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match="are not an authority of `baton certs`"):
        create_certificates(tmp_path / "a", ["head"], 1)


def test_certificates_and_unencrypted_kv_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nixl, which does not encrypt KV"):
        BatonConfig.from_dict({"security": files(tmp_path, "head"), "kv_transfer": {"transport": "nixl"}})


def test_relative_files_are_found_beside_the_configuration(tmp_path: Path) -> None:
    create_certificates(tmp_path, ["head"], 1)
    file = tmp_path / "cluster.yaml"
    file.write_text("security: {ca: head/ca.pem, certificate: head/node.pem, key: head/node.key}")
    assert load_config(file).security.key == str(tmp_path / "head" / "node.key")


@pytest.mark.parametrize(
    ("given", "problem"),
    [(["ca"], "certificate and key are missing"), (["certificate", "key"], "ca is missing"), (["ca", "key"], "e is m")],
)
def test_a_part_of_the_section_is_refused(given: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"security needs ca, certificate and key together; .*{problem}"):
        BatonConfig.from_dict({"security": dict.fromkeys(given, "/file.pem")})


def test_a_folder_that_cannot_be_made_is_no_question_of_space() -> None:
    with pytest.raises(StorageError) as caught:
        create_certificates(Path("/proc/x"), ["head"], 1)
    assert caught.value.message == "/proc/x/ca.key cannot be written: No such file or directory. Choose another folder."
