"""The file of API keys: read at the start, and again whenever it changes."""

import asyncio
import logging
from pathlib import Path

from pydantic import Field, PositiveInt, ValidationError

from outrider.core.errors import ConfigError
from outrider.router.api_keys import ApiKey, KeyRing
from outrider.router.limits import KeyLimits
from outrider_cluster.sections import SecuritySettings
from outrider_cluster.sections.base import Section
from outrider_cluster.yaml_source import YamlSource

__all__ = ["MAX_ID_CHARS", "KeyFile", "KeyFollower"]

_log = logging.getLogger(__name__)

MAX_ID_CHARS = 64
"""Longest id of a key."""

_Stamp = tuple[int, int, int]


class _Entry(Section):
    """One key of the file."""

    id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    max_concurrent_sequences: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None


class _Content(Section):
    keys: list[_Entry]


class KeyFile:
    """A YAML file of keys. Mounted secrets swap files: every read opens it anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: _Stamp | None = None

    def read(self) -> tuple[ApiKey, ...]:
        """The keys of the file as it is now. Raises `ConfigError`; what the file holds is not in the message."""
        self._stamp = self._look()
        try:
            text = self._path.read_text(encoding="utf-8")
            source = YamlSource(text, self._path.name, shape="`keys:` with the entries below it")
            content = _Content.model_validate(source.value)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"security.api_keys_file: cannot be read: {type(error).__name__}") from error
        except ValidationError as error:
            problems = [source.describe(one["loc"], one["msg"]) for one in error.errors(include_url=False)]
            raise ConfigError("security.api_keys_file: " + "; ".join(problems)) from error
        return tuple(
            ApiKey(
                key_id=one.id,
                digest=bytes.fromhex(one.sha256),
                limits=KeyLimits(
                    max_concurrent_sequences=one.max_concurrent_sequences,
                    requests_per_minute=one.requests_per_minute,
                    tokens_per_minute=one.tokens_per_minute,
                ),
            )
            for one in content.keys
        )

    def changed(self) -> bool:
        """Whether the file is another one, or gone, since the last read."""
        return self._look() != self._stamp

    def _look(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


class KeyFollower:
    """A ring of keys that stays equal to a file, for as long as one is named. Used on one event loop."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.ring = KeyRing()
        self._interval_s = interval_s
        self._path: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def apply(self, security: SecuritySettings) -> None:
        """Use this file from now on; without one, everybody may call. Raises `ConfigError`, and changes nothing."""
        path = security.api_keys_file
        if path == self._path:
            return
        if path is None:
            self.ring.open_to_all()
        else:
            file = KeyFile(Path(path))
            self.ring.replace(await asyncio.to_thread(file.read))
        self.close()
        self._path = path
        if path is not None:
            self._task = asyncio.create_task(self._follow(file), name="api-keys")

    def close(self) -> None:
        """Follow no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self, file: KeyFile) -> None:
        """A file that cannot be used leaves the last keys in force: a mistake in it locks nobody out."""
        while True:
            await asyncio.sleep(self._interval_s)
            if not await asyncio.to_thread(file.changed):
                continue
            try:
                keys = await asyncio.to_thread(file.read)
                self.ring.replace(keys)
            except ConfigError as error:
                _log.error("API keys stay as they were: %s", error)
            else:
                _log.info("%d API keys are in force", len(keys))
