"""From one deployment's settings to the configuration of each part."""

from typing import TYPE_CHECKING

from outrider.core.load import LoadTargets
from outrider.core.policy import GateSettings
from outrider.core.speculation import VerificationRule
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.router.limits import AdmissionLimits, RouterLimits
from outrider.rpc.tls import TlsFiles
from outrider.target.config import TargetConfig
from outrider.target.supervision import SupervisionPolicy
from outrider_cluster.emulated import emulated_engine
from outrider_cluster.sections import (
    SELF_DRAFT,
    AutoscalingSettings,
    DraftSettings,
    EngineKind,
    KvSettings,
    TargetSettings,
)
from outrider_cluster.settings import Environment, Settings

if TYPE_CHECKING:
    from outrider.engine.scripted import ScriptedConfig

__all__ = [
    "draft_config",
    "draft_engine_config",
    "draft_model_name",
    "gate_settings",
    "load_targets",
    "router_limits",
    "supervision_policy",
    "target_config",
    "target_engine_config",
    "tls_files",
]

_GIB = 1 << 30


def target_engine_config(settings: Settings, environment: Environment) -> EngineConfig:
    """The engine of one target rank."""
    target = settings.target
    return EngineConfig(
        model=settings.model.name,
        kind=settings.engine.value,
        feature_head=_feature_head(settings),
        scripted=_scripted(settings, target.kv, agreement=1.0),
        emulated=emulated_engine(settings, target.kv, drafts=False),
        cache_dir=environment.cache_dir,
        device="cuda" if target.gpus_per_rank else "cpu",
        dtype=settings.model.dtype,
        block_size=target.kv.block_size,
        num_blocks=target.kv.num_blocks,
        kv_bytes=_kv_bytes(target.kv),
        max_model_len=settings.model.max_model_len,
        tensor_parallel_size=target.tensor_parallel_size,
        threads=target.threads_per_rank,
        attention=target.cuda.attention,
        cuda_graphs=target.cuda.graphs,
        graph_batch_sizes=target.cuda.graph_batch_sizes,
        graph_widths=target.cuda.graph_widths,
        peer_timeout_s=target.timeouts.collective_s,
    )


def draft_engine_config(settings: Settings, draft: DraftSettings, environment: Environment) -> EngineConfig:
    """The engine of one draft replica."""
    return EngineConfig(
        model=draft_model_name(settings, draft),
        kind="eagle3" if draft.method == "eagle3" else settings.engine.value,
        head_of=settings.model.name if draft.method == "eagle3" else None,
        scripted=_scripted(settings, draft.kv, agreement=settings.scripted.draft_agreement),
        emulated=emulated_engine(settings, draft.kv, drafts=True),
        cache_dir=environment.cache_dir,
        device="cuda" if draft.num_gpus else "cpu",
        dtype=draft.dtype,
        quantization=draft.quantization,
        block_size=draft.kv.block_size,
        num_blocks=draft.kv.num_blocks,
        kv_bytes=_kv_bytes(draft.kv),
        max_model_len=draft.max_model_len or settings.model.max_model_len,
        threads=draft.threads,
        attention=draft.cuda.attention,
        cuda_graphs=draft.cuda.graphs,
        graph_batch_sizes=draft.cuda.graph_batch_sizes,
        graph_widths=draft.cuda.graph_widths,
    )


def draft_model_name(settings: Settings, draft: DraftSettings) -> str:
    """What the draft loads: its own model, or the target's weights."""
    return settings.model.name if draft.model == SELF_DRAFT else draft.model


def _feature_head(settings: Settings) -> str | None:
    """The head that the target stores features for."""
    draft = settings.active_draft
    return draft.model if draft is not None and draft.method == "eagle3" else None


def target_config(settings: Settings) -> TargetConfig:
    """Settings of the engine loop."""
    target, speculation = settings.target, settings.speculation
    return TargetConfig(
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
        max_waiting_seqs=target.max_waiting_seqs,
        prefill_chunk_tokens=min(target.prefill_chunk_tokens, target.max_num_batched_tokens),
        max_draft_wait_s=speculation.max_draft_wait_ms / 1000.0,
        max_draft_tokens_limit=target.max_draft_tokens_limit,
        prompt_lookup_max=speculation.ngram.prompt_lookup_max if speculation.ngram.enabled else 0,
        prompt_lookup_min=speculation.ngram.prompt_lookup_min,
        enable_prefix_cache=target.enable_prefix_cache,
    )


def draft_config(settings: Settings, draft: DraftSettings) -> DraftConfig:
    """Settings of the drafting loop."""
    return DraftConfig(max_num_seqs=draft.max_num_seqs, max_num_draft_tokens=settings.target.max_draft_tokens_limit)


def gate_settings(settings: Settings) -> GateSettings:
    """Policy of the gate."""
    return settings.speculation.gate()


def router_limits(settings: Settings) -> RouterLimits:
    """What a router checks requests against."""
    router = settings.router
    speculates = settings.active_draft is not None or settings.speculation.ngram.enabled
    # The formula model's draft speaks no laws worth comparing, but its engine knows both rules.
    rules = (VerificationRule.COUPLED, VerificationRule.REJECTION)
    return RouterLimits(
        model=settings.model.public_name,
        max_model_len=settings.model.max_model_len,
        max_num_speculative_tokens=settings.target.max_draft_tokens_limit if speculates else 0,
        verification_rules=rules,
        default_timeout_ms=round(router.default_timeout_s * 1000),
        max_timeout_ms=round(router.max_timeout_s * 1000),
        admission=AdmissionLimits(
            max_requests=router.max_running_requests,
            max_tokens=router.max_running_tokens,
            max_requests_per_key=router.max_running_requests_per_key,
        ),
    )


def load_targets(target: TargetSettings) -> LoadTargets:
    """The load that one target replica shall have; the autoscaler's defaults where it is off."""
    scaling = target.autoscaling or AutoscalingSettings()
    return LoadTargets(
        sequences=scaling.target_load * target.max_num_seqs,
        kv_usage=scaling.target_kv_usage,
        queue_s=scaling.target_queue_s,
    )


def tls_files(settings: Settings) -> TlsFiles | None:
    """The certificates of the data plane; None: plain text."""
    tls = settings.data_plane.tls
    if tls is None:
        return None
    return TlsFiles(cert_file=tls.cert_file, key_file=tls.key_file, ca_file=tls.ca_file, server_name=tls.server_name)


def supervision_policy(settings: Settings) -> SupervisionPolicy:
    """Time limits of the front."""
    timeouts = settings.target.timeouts
    return SupervisionPolicy(
        start_s=timeouts.start_s,
        heartbeat_interval_s=timeouts.heartbeat_interval_s,
        heartbeat_s=timeouts.heartbeat_s,
        backoff_s=timeouts.rebuild_backoff_s,
        backoff_max_s=timeouts.rebuild_backoff_max_s,
    )


def _kv_bytes(kv: KvSettings) -> int | None:
    return None if kv.cache_gib is None else round(kv.cache_gib * _GIB)


def _scripted(settings: Settings, kv: KvSettings, *, agreement: float) -> "ScriptedConfig | None":
    if settings.engine is not EngineKind.SCRIPTED:
        return None
    # Brings torch, which fronts and routers do not need.
    from outrider.engine.scripted import ScriptedConfig

    return ScriptedConfig(
        vocab_size=settings.scripted.vocab_size,
        seed=settings.scripted.seed,
        slope=settings.scripted.slope,
        agreement=agreement,
        num_blocks=kv.num_blocks or 1,
        block_size=kv.block_size,
        max_model_len=settings.model.max_model_len,
    )
