"""Logs as JSON, one line per event, with the request's id and never its text.

Further fields come through `extra`, and only those in `FIELDS` are written: a prompt that somebody
hands over by mistake goes nowhere.
"""

import json
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["FIELDS", "JsonLineFormatter", "configure", "request_logger"]

FIELDS = (
    "request_id",
    "trace_id",
    "engine_id",
    "engine_epoch",
    "replica_id",
    "rank",
    "draft",
    "error",
    "reason",
    "seconds",
)
"""Fields that `extra` may add to a line."""

RequestLogger = logging.LoggerAdapter[logging.Logger]


class JsonLineFormatter(logging.Formatter):
    """Writes time (UTC), level, logger and message of a record, then its fields, then its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without a line break, whatever the message holds."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: record.__dict__[name] for name in FIELDS if name in record.__dict__})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        # default=str: a log line is no place to fail over a value's type.
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, stream: TextIO, *, loggers: Iterable[str] = ("outrider", "outrider_cluster")) -> None:
    """Send our own loggers to `stream` as JSON lines; those of libraries stay as they are.

    For entry points of processes, once; a second call replaces the first. Raises `ValueError` for
    an unknown level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLineFormatter())
    for name in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.propagate = False
        for old in [one for one in logger.handlers if isinstance(one.formatter, JsonLineFormatter)]:
            logger.removeHandler(old)
        logger.addHandler(handler)


def request_logger(logger: logging.Logger, request_id: str) -> RequestLogger:
    """The logger, with this request's id on every line."""
    return logging.LoggerAdapter(logger, {"request_id": request_id})
