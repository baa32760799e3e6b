"""Every way a sequence ends, and that nothing behind the end is kept, counted or streamed."""

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.dispatch import SequenceErrorCode
from outrider.core.policy import GateSettings
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import FinishReason
from outrider.core.speculation import SpeculationPreference
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig

TARGET = ScriptedConfig(vocab_size=26, slope=0.7)


def make(k: int = 6, **settings: object) -> LocalEngine:
    gate = GateSettings(preference=SpeculationPreference.ON, max_num_draft_tokens=k)
    return LocalEngine(target=TARGET, draft=TARGET, gate=gate, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text() -> list[int]:
    (result,) = LocalEngine(target=TARGET).run(request(max_tokens=60))
    return result.token_ids


def first_new(text: list[int], start: int) -> int:
    """An index at or after `start` whose token has not stood before it."""
    return next(index for index in range(start, len(text)) if text[index] not in text[:index])


@pytest.mark.parametrize("kind", ["eos_token_ids", "token_ids"])
def test_stop_id_inside_an_accepted_block(text: list[int], kind: str) -> None:
    seen = set()
    at = first_new(text, 6)
    for k in range(1, 9):
        engine = make(k)
        (result,) = engine.run(request(max_tokens=60, **{kind: (text[at],)}))  # type: ignore[arg-type]
        assert result.token_ids == text[: at + 1]
        assert result.end is not None
        assert result.end.finish is not None
        assert result.end.finish.reason is FinishReason.STOP
        assert result.end.finish.stop_token_id == text[at]
        stats = result.end.speculation.stats
        assert stats.committed == at + 1 == stats.rounds + stats.accepted - stats.cut
        assert engine.loop.scheduler.kv_usage == 0.0
        seen.add(stats.cut)
    assert seen == {0, 1}, "the end fell both inside a block and on a round's last token"


def test_stop_string_across_tokens(text: list[int]) -> None:
    letters = "".join(chr(97 + token) for token in text)
    for at in range(3, 20, 3):
        stop = letters[at : at + 3]
        end = letters.index(stop) + 3
        (result,) = make().run(request(max_tokens=60, strings=("zzzzzz", stop)))
        assert result.token_ids == text[:end]
        assert result.end is not None
        assert result.end.finish is not None
        assert result.end.finish.stop_string_index == 1


def test_stop_string_across_a_resume(text: list[int]) -> None:
    letters = "".join(chr(97 + token) for token in text)
    stop = letters[8:11]
    end = letters.index(stop) + 3
    (result,) = make().run(request(max_tokens=60, strings=(stop,), resume=text[: end - 1]))
    assert result.token_ids == text[end - 1 : end]


def test_stop_strings_wait_for_min_tokens(text: list[int]) -> None:
    letters = "".join(chr(97 + token) for token in text)
    stop = letters[4]
    (result,) = make().run(request(max_tokens=60, strings=(stop,), min_tokens=30))
    assert len(result.token_ids) >= 30
    assert result.token_ids == text[: letters.index(stop, 29) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_length_is_exact(text: list[int], max_tokens: int) -> None:
    (result,) = make().run(request(max_tokens=max_tokens))
    assert result.token_ids == text[:max_tokens]
    assert result.end is not None
    assert result.end.finish is not None
    assert result.end.finish.reason is FinishReason.LENGTH


def test_min_tokens_hold_off_the_end(text: list[int]) -> None:
    sampling = SamplingParams(min_tokens=20, suppressed_token_ids=(text[3],))
    (result,) = make().run(request(max_tokens=60, sampling=sampling, eos_token_ids=(text[3],), min_tokens=20))
    assert len(result.token_ids) >= 20
    assert text[3] not in result.token_ids[:19]


def test_deadline_ends_only_its_own_sequence(text: list[int]) -> None:
    engine = make()
    late = engine.submit(request(max_tokens=60, timeout_s=5.0))
    other = engine.submit(request(max_tokens=60))
    engine.step(3)
    engine.clock.advance(10.0)
    while engine.loop.scheduler.has_work:
        engine.step()
    end = engine.results[late].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code is SequenceErrorCode.DEADLINE
    assert engine.results[other].token_ids == text


def test_deadline_reaches_the_waiting_line() -> None:
    engine = make(config=TargetConfig(max_num_seqs=1))
    first = engine.submit(request(max_tokens=60))
    waiting = engine.submit(request(max_tokens=60, timeout_s=1.0))
    engine.step(2)
    engine.clock.advance(2.0)
    engine.step(1)
    end = engine.results[waiting].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code is SequenceErrorCode.DEADLINE
    assert engine.results[first].end is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ()}, "input"),
        ({"prompt": (1, 26)}, "input"),
        ({"prompt": (1, -1)}, "input"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_tokens": 5, "resume": (1,) * 5}, "resume_token_ids"),
        ({"resume": (99,)}, "resume_token_ids"),
        ({"sampling": SamplingParams(logit_bias=((26, 1.0),))}, "logit_bias"),
    ],
)
def test_bad_sequence_is_refused_by_name_and_hurts_nobody(
    text: list[int], changes: dict[str, object], field: str
) -> None:
    engine = make()
    good = engine.submit(request(max_tokens=60))
    engine.step(2)
    bad = engine.submit(request(**changes))  # type: ignore[arg-type]
    end = engine.results[bad].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.code is SequenceErrorCode.INVALID
    assert end.failure.message.startswith(field)
    while engine.loop.scheduler.has_work:
        engine.step()
    assert engine.results[good].token_ids == text


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = LocalEngine(target=ScriptedConfig(vocab_size=26, num_blocks=8, block_size=4))
    (result,) = engine.run(request(max_tokens=60))
    assert result.end is not None
    assert result.end.failure is not None
    assert "KV memory" in result.end.failure.message
