"""Logs, one line per event, as JSON or for the eye, with the request's id and never its text.

Further fields come through `extra`, and only those in `FIELDS` are written: a prompt that somebody
hands over by mistake goes nowhere.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["FIELDS", "JsonLineFormatter", "TextLineFormatter", "configure"]

FIELDS = (
    "request_id",
    "choice_index",
    "trace_id",
    "engine_id",
    "engine_epoch",
    "replica_id",
    "router_id",
    "rank",
    "draft",
    "error",
    "reason",
    "outcome",
    "seconds",
    "prompt_tokens",
    "output_tokens",
    "running",
    "waiting",
)
"""Fields that `extra` may add to a line."""


class JsonLineFormatter(logging.Formatter):
    """Writes time (UTC), level, logger and message of a record, then its fields, then its traceback."""

    def __init__(self, process: Mapping[str, str] | None = None) -> None:
        """`process`: what every line of this process says about it."""
        super().__init__()
        self._process = dict(process or {})

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without a line break, whatever the message holds."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        # default=str: a log line is no place to fail over a value's type.
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLineFormatter(logging.Formatter):
    """The same for the eye: `time level logger: message key=value …`, a traceback behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and more only for a traceback."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower()} {record.name}: {_printable(record.getMessage() + fields)}"
        if record.exc_info and record.exc_info[0] is not None:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def configure(
    level: str,
    stream: TextIO,
    *,
    loggers: Iterable[str] = ("outrider", "outrider_cluster"),
    as_text: bool = False,
    process: Mapping[str, str] | None = None,
) -> None:
    """Send our own loggers to `stream`, a line per event; those of libraries stay as they are.

    For entry points of processes, once; a second call replaces the first. `process`: what every JSON
    line says about this process. Raises `ValueError` for an unknown level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLineFormatter() if as_text else JsonLineFormatter(process))
    for name in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.propagate = False
        for old in [one for one in logger.handlers if isinstance(one.formatter, JsonLineFormatter | TextLineFormatter)]:
            logger.removeHandler(old)
        logger.addHandler(handler)


def _printable(text: str) -> str:
    """The text with line breaks and the like escaped: what clients write can end no line and begin none."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
