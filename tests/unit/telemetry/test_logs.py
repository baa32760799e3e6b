"""Log lines that a machine reads."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.core.dispatch import SequenceEnd, SequenceErrorCode, SequenceFailure
from outrider.core.request import SequenceRequest, StopConditions
from outrider.telemetry.logs import JsonLineFormatter, configure
from outrider.telemetry.sequence_log import SequenceLog
from outrider.telemetry.spans import NullSequenceSpans

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


def test_every_line_says_which_process_wrote_it() -> None:
    stream = io.StringIO()
    configure("info", stream, loggers=[f"{NAME}.process"], process={"service": "router", "instance": "r0"})
    logging.getLogger(f"{NAME}.process").info("hello", extra={"request_id": "r1"})
    (line,) = lines(stream)
    assert (line["service"], line["instance"], line["request_id"]) == ("router", "r0", "r1")


def test_lines_for_the_eye_hold_the_same_fields_and_stay_lines() -> None:
    stream = io.StringIO()
    configure("info", stream, loggers=[f"{NAME}.text"], as_text=True)
    fields = {"request_id": "r1\r\n\u2028forged", "prompt": "secret"}
    logging.getLogger(f"{NAME}.text").info("first\nsecond “é”", extra=fields)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(f"info {NAME}.text: first\\nsecond “é” request_id=r1\\r\\n\\u2028forged")


@pytest.mark.parametrize(("level", "logged"), [("info", ["deadline"]), ("debug", ["finished", "deadline"])])
def test_the_engine_logs_its_failed_sequences_and_on_demand_all(
    level: str, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    request = SequenceRequest(
        request_id="r1", prompt_token_ids=(70001,), stop=StopConditions(max_tokens=8), noise_key=1, choice_index=2
    )
    failure = SequenceFailure(code=SequenceErrorCode.DEADLINE, message="secret")
    log = SequenceLog(NullSequenceSpans(), "e0")
    with caplog.at_level(level.upper(), "outrider.telemetry.sequence_log"):
        for end in (SequenceEnd(stream_key=1), SequenceEnd(stream_key=1, failure=failure)):
            log.sequence_ended(log.sequence_arrived(request), end)
    assert [vars(one)["outcome"] for one in caplog.records] == logged
    lines = "".join(JsonLineFormatter().format(one) for one in caplog.records)
    assert json.loads(JsonLineFormatter().format(caplog.records[-1]))["request_id"] == "r1"
    assert "secret" not in lines
    assert "70001" not in lines


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure("loud", io.StringIO(), loggers=[f"{NAME}.unused"])
