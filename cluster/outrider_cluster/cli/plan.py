"""`outrider plan`: where a device's memory goes, and how many sequences it then holds."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from outrider.engine.device_memory import device_memory_bytes
from outrider.engine.memory_plan import GIB, DraftLoad, MemoryPlan, MemorySettings, plan_memory
from outrider.engine.model_sizes import ModelSizes
from outrider.engine.models.config_file import read_config
from outrider_cluster.cli.terminal import errors_as_exit_codes, progress
from outrider_cluster.memory import DevicePlan, plans_of
from outrider_cluster.settings import Environment, Settings, default_settings, load_settings

__all__ = ["plan", "plan_table"]

_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def plan(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file; without one, and without --model, the laptop's.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of a file: a model, by short name, folder, config.json or hub id.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="With --model: its draft.")] = None,
    colocate_draft: Annotated[
        bool, typer.Option("--colocate-draft", help="The draft shares the GPU of rank 0 instead of having its own.")
    ] = False,
    tp: Annotated[int, typer.Option(help="With --model: tensor_parallel_size.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="With --model.")] = "bfloat16",
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="With --model.")] = "cuda",
    max_model_len: Annotated[int, typer.Option(help="With --model.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="With --model.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="With --model.")] = 2048,
    block_size: Annotated[int, typer.Option(help="With --model.")] = 16,
    k: Annotated[int, typer.Option("--k", help="With --model: most draft tokens a round.")] = 5,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of one GPU, or of the system without GPUs; default: ask.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of it that may be used; default: the file's, or 0.9.")
    ] = None,
) -> None:
    """Print the byte budget of each kind of device; exit code 1 when something does not fit."""
    with errors_as_exit_codes():
        environment = Environment.read()
        if model is None:
            settings = default_settings() if config is None else load_settings(config)
            plans = _configured(settings, environment, gpu_memory_gib, gpu_memory_utilization)
        else:
            memory = MemorySettings(
                memory_bytes=_memory(device, gpu_memory_gib),
                gpu_memory_utilization=0.9 if gpu_memory_utilization is None else gpu_memory_utilization,
                device=device,
                dtype=dtype,
                tensor_parallel_size=tp,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_draft_tokens=k,
                block_size=block_size,
            )
            sizes = ModelSizes.of_config(read_config(model, environment.cache_dir, progress))
            draft = None
            if draft_model is not None:
                draft = ModelSizes.of_config(read_config(draft_model, environment.cache_dir, progress))
            plans = _described(sizes, memory, draft, together=colocate_draft or device == "cpu")
        console = Console(highlight=False)
        if not plans:
            console.print("a scripted engine has no bytes to count")
        for one in plans:
            memory = one.plan.settings
            console.print(
                f"{one.device}: {memory.usable_bytes / GIB:.2f} of {memory.memory_bytes / GIB:.2f} GiB usable"
            )
            console.print(plan_table(one))
            console.print(_sequences(one.plan), markup=False)


def _configured(
    settings: Settings, environment: Environment, memory_gib: float | None, utilization: float | None
) -> list[DevicePlan]:
    if utilization is not None:
        target = settings.target.model_copy(update={"gpu_memory_utilization": utilization})
        settings = settings.model_copy(update={"target": target})
    draft = settings.active_draft
    gpus = settings.target.gpus_per_rank or (draft is not None and draft.num_gpus)

    def memory_of(device: Literal["cuda", "cpu"]) -> int:
        # The option is about GPUs where there is one.
        return _memory(device, None if gpus and device == "cpu" else memory_gib)

    return plans_of(settings, environment, memory_of, progress)


def _described(
    sizes: ModelSizes, memory: MemorySettings, draft: ModelSizes | None, *, together: bool
) -> list[DevicePlan]:
    here = "system memory" if memory.device == "cpu" else "the GPU of rank 0"
    if draft is None:
        return [DevicePlan(here, plan_memory(sizes, memory))]
    load = DraftLoad(sizes=draft)
    if together:
        return [DevicePlan(here, plan_memory(sizes, memory, load))]
    own = replace(load.settings(memory), max_model_len=min(memory.max_model_len, draft.max_positions))
    return [DevicePlan(here, plan_memory(sizes, memory)), DevicePlan("the draft's GPU", plan_memory(draft, own))]


def _memory(device: Literal["cuda", "cpu"], gib: float | None) -> int:
    return device_memory_bytes(device) if gib is None else round(gib * GIB)


def plan_table(one: DevicePlan) -> Table:
    """One line an item, in GiB, and what remains of the usable memory."""
    plan, settings = one.plan, one.plan.settings
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("item")
    table.add_column("GiB", justify="right")
    for item in plan.items:
        table.add_row(item.name, f"{item.num_bytes / GIB:.2f}")
    table.add_row(f"KV, {plan.num_blocks} blocks of {settings.block_size}", f"{plan.kv_bytes / GIB:.2f}")
    table.add_row("left", f"{plan.left_bytes / GIB:.2f}")
    return table


def _sequences(plan: MemoryPlan) -> str:
    longest = plan.settings.max_model_len
    contexts = [*(context for context in _CONTEXTS if context < longest), longest]
    counts = ", ".join(f"{plan.max_sequences(context)} of {context}" for context in contexts)
    return f"sequences at once, by tokens of context: {counts} (max_num_seqs {plan.settings.max_num_seqs})"
