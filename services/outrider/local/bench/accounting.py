"""What the engine loop itself costs: CPU time per step and phase, on the scripted engine.

The model costs next to nothing there, so planning, verifying, committing and emitting stand alone.
The draft works on the engine's own thread, and its time is left out. No router takes part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from outrider.core.dispatch import EngineHello, EngineReport, ReportRequest, SequenceEnd, SequenceSubmit
from outrider.core.errors import EngineUnavailable
from outrider.core.link import Hello
from outrider.core.policy import GateSettings
from outrider.core.ports import EngineSession
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationMode, SpeculationPreference
from outrider.draft.config import DraftConfig, DraftIdentity
from outrider.draft.drafter import Drafter
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.engine.scripted_text import ScriptedTokenizer
from outrider.engine.sequence_kv import KVCache
from outrider.local.bench.cpu_clock import ThreadCpuClock
from outrider.local.bench.inline_draft import InlineDraft
from outrider.target.builder import MonotonicClock, build_host
from outrider.target.config import TargetConfig
from outrider.target.host import EngineHost

__all__ = ["OVERHEAD_PHASES", "StepCost", "account_steps"]

OVERHEAD_PHASES = ("plan", "verify", "commit", "emit")
"""Phases of a step that are the loop's own."""

_PROMPT_LEN = 16
_AGREEMENT = 0.8
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """CPU time of a step."""

    num_seqs: int
    speculates: bool
    temperature: float
    steps: int
    phase_ms: dict[str, float]
    """Milliseconds per phase."""

    @property
    def overhead_ms(self) -> float:
        """Plan, verify, commit and emit together."""
        return sum(self.phase_ms.get(phase, 0.0) for phase in OVERHEAD_PHASES)


async def account_steps(
    *, num_seqs: int, speculates: bool, temperature: float = 0.0, max_tokens: int = 128, runs: int = 5
) -> StepCost:
    """Run `num_seqs` sequences side by side to their ends, several times; per phase the median run counts.

    Above temperature 0 the noise of every draw belongs to verifying. Raises `EngineUnavailable`.
    """
    scripted = ScriptedConfig(
        num_blocks=num_seqs * (-(-(_PROMPT_LEN + max_tokens + 16) // 16) + 1),
        block_size=16,
        max_model_len=_PROMPT_LEN + max_tokens + 16,
    )
    host = _host(scripted, num_seqs=num_seqs, speculates=speculates)
    session = host.connect("accounting")
    host.start()
    wish = SpeculationPreference.ON if speculates else SpeculationPreference.OFF
    requests = [_request(index, max_tokens, temperature, wish) for index in range(num_seqs)]
    counted, phase_ms = 0, []
    try:
        await _run(session, requests)  # what is made once
        before = await _counters(session)
        for _ in range(runs):
            await _run(session, requests)
            after = await _counters(session)
            steps = after.steps - before.steps
            counted += steps
            phase_ms.append(
                {name: 1e3 * (after.seconds[name] - before.seconds[name]) / steps for name in after.seconds}
            )
            before = after
    finally:
        session.close()
        await asyncio.to_thread(host.stop, _STOP_S)
    return StepCost(
        num_seqs=num_seqs,
        speculates=speculates,
        temperature=temperature,
        steps=counted,
        phase_ms={name: median(one[name] for one in phase_ms) for name in phase_ms[0]},
    )


def _host(scripted: ScriptedConfig, *, num_seqs: int, speculates: bool) -> EngineHost:
    clock = ThreadCpuClock()
    engine = ScriptedEngine(scripted)
    tokenizer = ScriptedTokenizer(scripted.vocab_size)
    limits = engine.limits
    hello = EngineHello(
        engine_id="accounting",
        engine_epoch=1,
        model="scripted",
        max_model_len=limits.max_model_len,
        kv_capacity_tokens=limits.num_blocks * limits.block_size,
    )
    return build_host(
        engine=engine,
        hello=hello,
        config=TargetConfig(max_num_seqs=num_seqs, enable_prefix_cache=False),
        gate_settings=GateSettings(mode=SpeculationMode.SEQUENTIAL, batch_size_threshold=None),
        num_valid_ids=limits.vocab_size,
        detokenizers=tokenizer.detokenizer,
        transport=_draft(scripted, tokenizer, num_seqs, clock) if speculates else None,
        on_failure=lambda cause: None,  # the session hears of it
        clock=clock,
    )


def _draft(target: ScriptedConfig, tokenizer: ScriptedTokenizer, num_seqs: int, clock: ThreadCpuClock) -> InlineDraft:
    engine = ScriptedEngine(
        ScriptedConfig(
            agreement=_AGREEMENT,
            num_blocks=2 * target.num_blocks,
            block_size=target.block_size,
            max_model_len=target.max_model_len,
        )
    )
    limits = engine.limits
    identity = DraftIdentity(
        incarnation=1,
        model="scripted",
        vocab_size=limits.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint(),
    )
    drafter = Drafter(
        engine=engine,
        kv=KVCache(num_blocks=limits.num_blocks, block_size=limits.block_size),
        identity=identity,
        config=DraftConfig(max_num_seqs=max(256, num_seqs), max_round_seqs=max(64, num_seqs)),
        clock=MonotonicClock(),
    )
    hello = Hello(
        engine_id="accounting",
        engine_epoch=1,
        link_id=1,
        target_model="scripted",
        vocab_size=limits.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        max_num_draft_tokens=16,
        max_model_len=limits.max_model_len,
        max_num_seqs=num_seqs,
    )
    return InlineDraft(drafter, hello, clock)


def _request(index: int, max_tokens: int, temperature: float, wish: SpeculationPreference) -> SequenceRequest:
    return SequenceRequest(
        request_id=f"account-{index}",
        prompt_token_ids=tuple((3 + 5 * index + 7 * position) % 64 for position in range(_PROMPT_LEN)),
        sampling=SamplingParams(temperature=temperature),
        stop=StopConditions(max_tokens=max_tokens),
        noise_key=index,
        speculation=SpeculationChoice(preference=wish),
    )


async def _run(session: EngineSession, requests: Sequence[SequenceRequest]) -> None:
    session.send([SequenceSubmit(stream_key=key, request=one) for key, one in enumerate(requests, 1)])
    left = len(requests)
    while left:
        for event in await session.receive():
            if isinstance(event, SequenceEnd):
                if event.failure is not None:
                    raise EngineUnavailable(event.failure.message)
                left -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    steps: int
    seconds: dict[str, float]


async def _counters(session: EngineSession) -> _Counters:
    session.send([ReportRequest(nonce=1)])
    while True:
        for event in await session.receive():
            if isinstance(event, EngineReport) and event.nonce:
                totals = event.status.totals
                return _Counters(steps=totals.steps, seconds=dict(totals.step_seconds))
