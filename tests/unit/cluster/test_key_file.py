"""The file of API keys: read whole or not at all, and again whenever it changes."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from outrider.core.errors import ConfigError, Unauthenticated
from outrider.router.api_keys import digest_of
from outrider.router.limits import KeyLimits
from outrider_cluster.cli.keys import keys as keys_command
from outrider_cluster.key_file import KeyFile, KeyFollower
from outrider_cluster.sections import SecuritySettings
from outrider_cluster.service import running_service
from outrider_cluster.settings import parse_settings

MINIMAL = """engine: scripted
model: {name: scripted, dtype: float32, max_model_len: 64}
target: {kv: {block_size: 16, num_blocks: 32}}
"""


def content(*keys: str) -> str:
    return yaml.safe_dump({"keys": [{"id": f"owner of {one}", "sha256": digest_of(one).hex()} for one in keys]})


def settings(path: Path | None) -> SecuritySettings:
    return SecuritySettings(api_keys_file=None if path is None else str(path))


def test_keys_and_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- id: a\n  sha256: {digest_of('or-1').hex()}\n  tokens_per_minute: 7\n")
    (key,) = KeyFile(path).read()
    assert (key.key_id, key.digest, key.limits) == ("a", digest_of("or-1"), KeyLimits(tokens_per_minute=7))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keys: [", "keys.yaml:"),
        ("keys:\n- id: a\n  sha256: or-1\n", "keys.yaml:3: keys.0.sha256"),
        ("keys:\n- id: a\n  sha256: " + "0" * 64 + "\n  limit: 3\n", "keys.yaml:4: keys.0.limit"),
        ("keys:\n- id: a\n  sha256: " + "0" * 64 + "\n  requests_per_minute: 0\n", "requests_per_minute"),
        ("other: 1\n", "keys"),
        ("- id: a\n  sha256: " + "0" * 64 + "\n", "keys.yaml:1: the file has to be `keys:` with the entries below it"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_line_and_field(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyFile(path).read()
    assert problem in str(caught.value)
    assert "or-1" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_that_cannot_be_used_is_refused_before_a_cluster_starts(tmp_path: Path) -> None:
    told: list[str] = []
    settings = parse_settings(f"{MINIMAL}security: {{api_keys_file: {tmp_path / 'none'}}}\n", origin="f.yaml")
    with pytest.raises(ConfigError, match="api_keys_file: cannot be read"), running_service(settings, told.append):
        pytest.fail("it serves")
    assert told == []


def test_a_file_that_is_missing_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.api_keys_file: cannot be read: FileNotFoundError"):
        KeyFile(tmp_path / "none").read()


def test_a_swapped_file_is_a_change(tmp_path: Path) -> None:
    path, other = tmp_path / "keys.yaml", tmp_path / "other.yaml"
    path.write_text(content("or-1"))
    file = KeyFile(path)
    file.read()
    assert not file.changed()
    other.write_text(content("or-2"))
    os.replace(other, path)
    assert file.changed()
    file.read()
    path.unlink()
    assert file.changed()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - plain state of the code under test
            await asyncio.sleep(0.005)


async def test_the_ring_follows_the_file_and_outlives_mistakes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content("or-1"))
    follower = KeyFollower(interval_s=0.005)
    await follower.apply(settings(path))
    assert follower.ring.authenticate("or-1") == "owner of or-1"
    path.write_text("keys: [")
    await eventually(lambda: "API keys stay as they were" in caplog.text)
    assert follower.ring.authenticate("or-1") == "owner of or-1"
    path.write_text(content("or-2"))
    await eventually(lambda: knows(follower, "or-2"))
    assert not knows(follower, "or-1")
    follower.close()


async def test_another_file_and_none_apply_live(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(content("or-1"))
    second.write_text(content("or-2"))
    follower = KeyFollower(interval_s=60)
    await follower.apply(settings(None))
    assert follower.ring.authenticate("") == ""
    await follower.apply(settings(first))
    await follower.apply(settings(second))
    assert knows(follower, "or-2")
    assert not knows(follower, "or-1")
    with pytest.raises(ConfigError):
        await follower.apply(settings(tmp_path / "none"))
    assert knows(follower, "or-2")
    await follower.apply(settings(None))
    assert follower.ring.authenticate("") == ""
    follower.close()


def knows(follower: KeyFollower, key: str) -> bool:
    try:
        follower.ring.authenticate(key)
    except Unauthenticated:
        return False
    return True


def test_a_new_key_opens_with_the_entry_that_was_printed(tmp_path: Path) -> None:
    done = CliRunner().invoke(keys_command, ["new", "team", "--requests-per-minute", "5"])
    assert done.exit_code == 0
    key = done.stderr.removeprefix("key: ").strip()
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + done.stdout)
    (made,) = KeyFile(path).read()
    assert (made.digest, made.limits.requests_per_minute) == (digest_of(key), 5)
    assert key not in done.stdout


def test_an_owner_whom_the_file_would_refuse_gets_no_key() -> None:
    done = CliRunner().invoke(keys_command, ["new", "x" * 65])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "OWNER: 65 characters" in done.stderr
