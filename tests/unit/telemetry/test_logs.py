"""Log lines that a machine reads."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.telemetry.logs import configure, request_logger

NAME = "outrider.test_logs"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure("info", stream, loggers=[NAME])
    yield stream
    logger = logging.getLogger(NAME)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_event_is_one_json_line(stream: io.StringIO) -> None:
    logging.getLogger(NAME).info("engine %s is ready\nand “well”", "e0", extra={"rank": 2})
    (line,) = lines(stream)
    time = line.pop("time")
    assert time.endswith("+00:00")
    assert line == {"level": "info", "logger": NAME, "message": "engine e0 is ready\nand “well”", "rank": 2}


def test_a_request_has_its_id_on_every_line(stream: io.StringIO) -> None:
    logger = request_logger(logging.getLogger(NAME), "r1")
    logger.warning("late")
    logger.error("gone")
    assert [(line["level"], line["request_id"]) for line in lines(stream)] == [("warning", "r1"), ("error", "r1")]


def test_a_field_that_is_not_listed_is_not_written(stream: io.StringIO) -> None:
    logging.getLogger(NAME).info("refused", extra={"prompt": "secret", "request_id": "r1"})
    assert "secret" not in stream.getvalue()
    assert lines(stream)[0]["request_id"] == "r1"


def test_an_exception_stays_on_the_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("rank 1 died")
    except RuntimeError:
        logging.getLogger(NAME).exception("engine failed")
    (line,) = lines(stream)
    assert line["exception"].endswith("RuntimeError: rank 1 died")


def test_a_value_of_any_type_is_written(stream: io.StringIO) -> None:
    logging.getLogger(NAME).info("failed", extra={"error": ValueError("x")})
    assert lines(stream)[0]["error"] == "x"


def test_the_level_holds_and_a_second_call_replaces_the_first(stream: io.StringIO) -> None:
    second = io.StringIO()
    configure("error", second, loggers=[NAME])
    logging.getLogger(NAME).info("quiet")
    logging.getLogger(NAME).error("loud")
    assert stream.getvalue() == ""
    assert [line["message"] for line in lines(second)] == ["loud"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure("loud", io.StringIO(), loggers=[f"{NAME}.unused"])
