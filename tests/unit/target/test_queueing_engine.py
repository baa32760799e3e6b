"""An engine that returns while its device works: the loop tells everybody about the last step meanwhile."""

from collections.abc import Sequence

from tests.support.local_engine import LocalEngine, request

from outrider.core.dispatch import EngineEvent, SequenceDelta
from outrider.engine.base import ForwardBatch, QueueingEngine, wait_of
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine

TARGET = ScriptedConfig(vocab_size=26, slope=0.7)


class Queueing(ScriptedEngine):
    """Notes when its forwards begin and are waited for."""

    def __init__(self, config: ScriptedConfig, log: list[str]) -> None:
        super().__init__(config)
        self._log = log

    def forward(self, batch: ForwardBatch):  # type: ignore[no-untyped-def]
        self._log.append("forward")
        return super().forward(batch)

    def wait(self) -> None:
        self._log.append("wait")


def test_wait_is_known_by_its_name() -> None:
    assert isinstance(Queueing(TARGET, []), QueueingEngine)
    assert wait_of(ScriptedEngine(TARGET)) is None


def test_tokens_leave_while_the_next_forward_runs_and_none_is_left_behind() -> None:
    (expected,) = LocalEngine(target=TARGET).run(request(max_tokens=5))
    log: list[str] = []
    local = LocalEngine(target=TARGET)
    engine = Queueing(TARGET, log)
    verifier = local.loop._verifier
    verifier._engine, verifier._wait = engine, engine.wait
    emit = local.loop._emit

    def logged(session_id: int, events: Sequence[EngineEvent]) -> None:
        log.extend("emit" for event in events if isinstance(event, SequenceDelta))
        emit(session_id, events)

    local.loop._emit = logged
    (result,) = local.run(request(max_tokens=5))
    assert result.token_ids == expected.token_ids
    # The last token does not wait for a forward that never comes.
    assert log == ["forward", "wait", *["forward", "emit", "wait"] * 4, "emit"]
