"""The memory plans of one deployment's settings: what each kind of device has to hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from outrider.core.errors import ConfigError
from outrider.engine.config import EngineConfig
from outrider.engine.device_memory import device_memory_bytes
from outrider.engine.memory_plan import GIB, DraftLoad, MemoryPlan, MemorySettings, blocks_in, plan_memory
from outrider.engine.model_sizes import ModelSizes
from outrider.engine.models.config_file import read_config
from outrider_cluster.assembly import draft_model_name
from outrider_cluster.sections import DraftSettings, KvSettings
from outrider_cluster.settings import Environment, Settings

__all__ = ["DevicePlan", "check_start", "draft_plan", "plans_of", "sized_draft", "sized_target", "target_plan"]

_CPU_RUNTIME_BYTES = GIB // 2
"""Interpreter and libraries of one process; there is no CUDA context."""


_CPU_KV_SHARE = 0.25
"""Of the usable memory, for a pool whose size nobody gave: a system has other work than this."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan, and the device that it is for."""

    device: str
    plan: MemoryPlan


Device = Literal["cuda", "cpu"]
Progress = Callable[[str], None]
MemoryOf = Callable[[Device], int]
"""Bytes of one GPU, or of the system. Asked only for devices that the deployment fills."""
PlanMaker = Callable[[Settings, Environment, MemoryOf, Progress], DevicePlan | None]


def plans_of(settings: Settings, environment: Environment, memory_of: MemoryOf, progress: Progress) -> list[DevicePlan]:
    """One plan per kind of device.

    Raises `ConfigError` with the number to change when something does not fit. An engine
    without weights has no bytes to count: no plans.
    """
    makers = (target_plan, draft_plan)
    plans = [make(settings, environment, memory_of, progress) for make in makers]
    return [one for one in plans if one is not None]


def target_plan(
    settings: Settings, environment: Environment, memory_of: MemoryOf, progress: Progress
) -> DevicePlan | None:
    """The device of rank 0; without GPUs the draft lives on it too. As `plans_of`."""
    if not settings.engine.has_weights:
        return None
    sizes = _sizes(settings.model.name, environment, progress)
    device: Device = "cuda" if settings.target.gpus_per_rank else "cpu"
    target = _target(settings, sizes, device, memory_of, environment, progress)
    if target.device == "cuda":
        return _named("the GPU of rank 0", sizes, target)
    draft = settings.active_draft
    if draft is None or draft.num_gpus:
        return _named("system memory", sizes, target)
    return _named("system memory", sizes, target, _draft(settings, draft, target, environment, progress)[0])


def draft_plan(
    settings: Settings, environment: Environment, memory_of: MemoryOf, progress: Progress
) -> DevicePlan | None:
    """The draft's own GPU; None where it has none. As `plans_of`."""
    draft = settings.active_draft
    if not settings.engine.has_weights or draft is None or not draft.num_gpus:
        return None
    sizes = _sizes(settings.model.name, environment, progress)
    target = _target(settings, sizes, "cuda", memory_of, environment, progress)
    load, own = _draft(settings, draft, target, environment, progress)
    return _named("the draft's GPU", load.sizes, own)


def check_start(make_plan: PlanMaker, settings: Settings, environment: Environment, log: Progress) -> DevicePlan | None:
    """Plan the device that this process is about to fill, and log the plan as one line.

    Raises `ConfigError` with the number to change: better before the weights are read than after.
    """
    if not settings.engine.has_weights:
        return None  # nothing to ask a device about, which may not be there
    one = make_plan(settings, environment, device_memory_bytes, log)
    if one is not None:
        log(f"{one.device}: {one.plan.summary()}")
    return one


def sized_target(config: EngineConfig, settings: Settings, environment: Environment, log: Progress) -> EngineConfig:
    """Rank 0's engine, with as many KV blocks as the plan has where the settings name no number.

    Checks the start as `check_start`, and raises as it.
    """
    one = check_start(target_plan, settings, environment, log)
    return (
        config if one is None or not _unsized(settings.target.kv) else replace(config, num_blocks=one.plan.num_blocks)
    )


def sized_draft(
    config: EngineConfig, settings: Settings, draft: DraftSettings, environment: Environment, log: Progress
) -> EngineConfig:
    """The same for a draft's engine. On a CPU, where it has no device of its own, it follows its target:
    its pool holds as many positions. Checks the start of a GPU as `check_start`, and raises as it."""
    own = check_start(draft_plan, settings, environment, log)
    if not settings.engine.has_weights or not _unsized(draft.kv):
        return config
    if own is not None:
        return replace(config, num_blocks=own.plan.num_blocks)
    shared = target_plan(settings, environment, device_memory_bytes, log)
    if shared is None:
        return config
    positions = shared.plan.num_blocks * settings.target.kv.block_size
    return replace(config, num_blocks=-(-positions // draft.kv.block_size))


def _unsized(kv: KvSettings) -> bool:
    return kv.num_blocks is None and kv.cache_gib is None


def _named(device: str, sizes: ModelSizes, settings: MemorySettings, draft: DraftLoad | None = None) -> DevicePlan:
    try:
        return DevicePlan(device, plan_memory(sizes, settings, draft))
    except ConfigError as error:
        raise ConfigError(f"{device}: {error}") from error


def _sizes(name: str, environment: Environment, progress: Progress) -> ModelSizes:
    return ModelSizes.of_config(read_config(name, environment.cache_dir, progress))


def _target(
    settings: Settings,
    sizes: ModelSizes,
    device: Device,
    memory_of: MemoryOf,
    environment: Environment,
    progress: Progress,
) -> MemorySettings:
    """The target's work on this kind of device."""
    target = settings.target
    draft, feature_bytes = settings.active_draft, 0
    if draft is not None and draft.method == "eagle3":
        # In bfloat16, already fused to the head's width.
        feature_bytes = 2 * _sizes(draft.model, environment, progress).hidden_size
    on_gpu = device == "cuda"
    memory = MemorySettings(
        memory_bytes=memory_of(device),
        gpu_memory_utilization=target.gpu_memory_utilization,
        device=device,
        dtype=settings.model.dtype,
        tensor_parallel_size=target.tensor_parallel_size,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
        num_draft_tokens=settings.speculation.max_num_draft_tokens,
        block_size=target.kv.block_size,
        feature_bytes=feature_bytes,
        kv_share=1.0 if on_gpu else _CPU_KV_SHARE,
        runtime_bytes=GIB if on_gpu else _CPU_RUNTIME_BYTES,
    )
    return replace(memory, num_blocks=_num_blocks(target.kv, sizes, memory))


def _draft(
    settings: Settings,
    draft: DraftSettings,
    target: MemorySettings,
    environment: Environment,
    progress: Progress,
) -> tuple[DraftLoad, MemorySettings]:
    """The draft as a load on the target's device, and as the settings of a device of its own."""
    sizes = _sizes(draft_model_name(settings, draft), environment, progress)
    if draft.method == "eagle3":
        sizes = replace(sizes, max_positions=settings.model.max_model_len)  # a head reaches as far as its target
    load = DraftLoad(sizes=sizes, dtype=draft.dtype, quantization=draft.quantization)
    own = replace(
        load.settings(target),
        max_model_len=draft.max_model_len or settings.model.max_model_len,
        max_num_seqs=draft.max_num_seqs,
        max_num_batched_tokens=max(load.max_num_batched_tokens, draft.max_num_seqs),
        block_size=draft.kv.block_size,
    )
    own = replace(own, num_blocks=_num_blocks(draft.kv, sizes, own))
    return replace(load, num_blocks=own.num_blocks), own


def _num_blocks(kv: KvSettings, sizes: ModelSizes, memory: MemorySettings) -> int | None:
    if kv.num_blocks is not None or kv.cache_gib is None:
        return kv.num_blocks
    return blocks_in(round(kv.cache_gib * GIB), sizes, memory)
