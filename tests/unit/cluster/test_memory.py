"""Plans of whole deployments, the command that prints them, and the refusal to start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engine.test_memory_plan import LLAMA_3_1_70B, LLAMA_3_2_1B, SMOLLM2_135M
from typer.testing import CliRunner

from outrider.core.errors import ConfigError
from outrider.engine.config import EngineConfig
from outrider.engine.device_memory import device_memory_bytes
from outrider.engine.memory_plan import GIB
from outrider.engine.models.config_file import read_config
from outrider_cluster import draft_alone, memory
from outrider_cluster.assembly import draft_engine_config, target_engine_config
from outrider_cluster.cli import app
from outrider_cluster.memory import check_start, draft_plan, plans_of, target_plan
from outrider_cluster.settings import Environment, Settings

CARD_GIB = 79.6


def config_file(folder: Path, name: str, config: dict[str, Any]) -> str:
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(cache_dir=tmp_path / "cache", auth_token="")


def memory_of(num_bytes: int) -> Callable[[str], int]:
    """Every device has so much."""
    return lambda device: num_bytes


@pytest.fixture
def reference(tmp_path: Path) -> Settings:
    """The reference group: a 70B on four GPUs and a 1B draft on a fifth."""
    return Settings.model_validate(
        {
            "model": {"name": config_file(tmp_path, "70b", LLAMA_3_1_70B), "max_model_len": 32768},
            "target": {
                "tensor_parallel_size": 4,
                "gpus_per_rank": 1,
                "kv": {"cache_gib": 24},
                "max_num_batched_tokens": 4096,
            },
            "draft": {
                "model": config_file(tmp_path, "1b", LLAMA_3_2_1B),
                "kv": {"cache_gib": 32},
                "num_gpus": 1,
            },
            "speculation": {"max_num_draft_tokens": 7},
        }
    )


@pytest.fixture
def laptop(tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "model": {"name": config_file(tmp_path, "135m", SMOLLM2_135M), "dtype": "float32", "max_model_len": 2048},
            "target": {
                "tensor_parallel_size": 2,
                "kv": {"num_blocks": 512},
                "max_num_seqs": 8,
                "max_num_batched_tokens": 256,
            },
            "draft": {"quantization": "int4", "kv": {"num_blocks": 512}, "max_num_seqs": 8},
        }
    )


def test_target_and_draft_have_a_plan_each(reference: Settings, environment: Environment) -> None:
    target, draft = plans_of(reference, environment, memory_of(round(CARD_GIB * GIB)), lambda _: None)
    assert (target.device, draft.device) == ("the GPU of rank 0", "the draft's GPU")
    assert target.plan.num_blocks == 24 * GIB // (2 * 80 * 256 * 2 * 128 * 2) == 1228
    assert draft.plan.num_blocks == 32 * GIB // (2 * 16 * 256 * 8 * 64 * 2) == 4096
    assert draft.plan.settings.num_draft_tokens == 0


def test_a_pool_that_does_not_fit_is_refused_with_the_one_that_does(
    reference: Settings, environment: Environment
) -> None:
    with pytest.raises(ConfigError, match=r"^the GPU of rank 0: memory: .*lower num_blocks to \d+"):
        plans_of(reference, environment, memory_of(60 * GIB), lambda _: None)


def test_a_laptop_has_one_memory_for_everything(laptop: Settings, environment: Environment) -> None:
    (one,) = plans_of(laptop, environment, memory_of(8 * GIB), lambda _: None)
    assert one.device == "system memory"
    names = [item.name for item in one.plan.items]
    assert {"sharded weights", "draft sharded weights", "draft KV"} <= set(names)
    assert "CUDA graphs" not in names
    assert one.plan.max_sequences(2048) == 4
    with pytest.raises(ConfigError, match="system memory: memory: "):
        plans_of(laptop, environment, memory_of(2 * GIB), lambda _: None)


def test_a_start_logs_its_plan_in_one_line_or_is_refused(laptop: Settings, environment: Environment) -> None:
    lines: list[str] = []
    check_start(target_plan, laptop, environment, lines.append)
    check_start(draft_plan, laptop, environment, lines.append)
    (line,) = lines
    assert line.startswith("system memory: memory plan")
    small = laptop.target.model_copy(update={"gpu_memory_utilization": 0.001})
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization to 0"):
        check_start(target_plan, laptop.model_copy(update={"target": small}), environment, lines.append)
    assert lines == [line]


def test_the_draft_is_planned_for_its_own_kind_of_device(
    laptop: Settings, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert laptop.draft is not None
    # A target on the CPU whose draft has a GPU, without a number of blocks.
    draft = type(laptop.draft).model_validate(laptop.draft.model_dump(exclude={"kv", "quantization"}) | {"num_gpus": 1})
    settings = laptop.model_copy(update={"draft": draft})
    asked: list[str] = []

    def memory_bytes(device: str) -> int:
        asked.append(device)
        return {"cuda": 4, "cpu": 8}[device] * GIB

    target, own = plans_of(settings, environment, memory_bytes, lambda _: None)
    assert (target.device, target.plan.settings.memory_bytes) == ("system memory", 8 * GIB)
    assert "draft sharded weights" not in {item.name for item in target.plan.items}
    assert own.device == "the draft's GPU"
    assert (own.plan.settings.device, own.plan.settings.memory_bytes) == ("cuda", 4 * GIB)
    assert own.plan.left_bytes < own.plan.block_bytes, "the GPU is the draft's alone"
    monkeypatch.setattr(memory, "device_memory_bytes", memory_bytes)
    config = draft_engine_config(settings, draft, environment)
    sized = memory.sized_draft(config, settings, draft, environment, lambda _: None)
    assert (sized.device, sized.num_blocks) == ("cuda", own.plan.num_blocks)
    # Without its GPU, nobody is asked about one: it may not be there.
    asked.clear()
    plans_of(laptop, environment, memory_bytes, lambda _: None)
    assert set(asked) == {"cpu"}


def unsized(settings: Settings) -> Settings:
    """The same deployment, whose pools get what fits."""
    assert settings.draft is not None
    return Settings.model_validate(settings.model_dump(exclude={"target": {"kv"}, "draft": {"kv"}}))


def test_a_gpu_pool_that_nobody_sized_takes_what_is_left(reference: Settings, environment: Environment) -> None:
    settings = unsized(reference)
    assert settings.draft is not None
    assert (settings.target.kv.block_size, settings.draft.kv.block_size) == (256, 256)
    target, draft = plans_of(settings, environment, memory_of(round(CARD_GIB * GIB)), lambda _: None)
    for one in (target, draft):
        assert 0 <= one.plan.left_bytes < one.plan.block_bytes
    assert target.plan.num_blocks > 1228


def test_cpu_pools_that_nobody_sized_take_a_share(
    laptop: Settings, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "device_memory_bytes", lambda device: 16 * GIB)
    settings = unsized(laptop)
    draft = settings.draft
    assert draft is not None
    start = (environment, lambda line: None)
    target_config = memory.sized_target(target_engine_config(settings, environment), settings, *start)
    draft_config = memory.sized_draft(draft_engine_config(settings, draft, environment), settings, draft, *start)
    (one,) = plans_of(settings, environment, memory_of(16 * GIB), lambda _: None)
    assert target_config.num_blocks == draft_config.num_blocks == one.plan.num_blocks
    assert one.plan.block_bytes * (one.plan.num_blocks + 1) > 0.25 * one.plan.settings.usable_bytes >= one.plan.kv_bytes
    sized = memory.sized_target(target_engine_config(laptop, environment), laptop, *start)
    assert sized.num_blocks == 512, "a number that was given stays"


async def test_a_draft_that_runs_alone_is_sized_like_any_other(
    laptop: Settings, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    class Rank:
        def __init__(self, *args: object, engine_config: EngineConfig) -> None:
            configs.append(engine_config)

        async def start(self) -> str:
            return "127.0.0.1:1"

    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(environment.cache_dir))
    monkeypatch.setattr(memory, "device_memory_bytes", lambda device: 16 * GIB)
    monkeypatch.setattr(draft_alone, "PrimaryRank", Rank)
    monkeypatch.setattr(draft_alone, "own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert await draft_alone.DraftAlone(unsized(laptop)).start() == "127.0.0.1:1"
    (plan,) = plans_of(unsized(laptop), environment, memory_of(16 * GIB), lambda _: None)
    assert [one.num_blocks for one in configs] == [plan.plan.num_blocks]


def test_a_scripted_engine_has_no_bytes_to_count(environment: Environment) -> None:
    settings = Settings.model_validate(
        {
            "engine": "scripted",
            "model": {"name": "scripted", "max_model_len": 64},
            "target": {"kv": {"num_blocks": 8}},
        }
    )
    assert plans_of(settings, environment, memory_of(1), lambda _: None) == []


def test_a_container_limit_counts_as_the_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = device_memory_bytes("cpu", cgroup_limit=limit)
    limit.write_text("max\n")
    assert device_memory_bytes("cpu", cgroup_limit=limit) == whole
    limit.write_text(f"{GIB // 2}\n")
    assert device_memory_bytes("cpu", cgroup_limit=limit) == GIB // 2


def test_the_command_prints_the_budget_of_a_described_model(tmp_path: Path) -> None:
    arguments = ["plan", "--model", config_file(tmp_path, "70b", LLAMA_3_1_70B), "--tp", "4", "--k", "7"]
    arguments += ["--draft-model", config_file(tmp_path, "1b", LLAMA_3_2_1B), "--gpu-memory-gib", str(CARD_GIB)]
    alone = CliRunner().invoke(app, arguments)
    assert alone.exit_code == 0, alone.output
    assert "the GPU of rank 0: 71.64 of 79.60 GiB usable" in alone.stdout
    assert "the draft's GPU" in alone.stdout
    assert "draft sharded weights" not in alone.stdout
    together = CliRunner().invoke(app, [*arguments, "--colocate-draft"])
    assert together.exit_code == 0
    assert "draft sharded weights" in together.stdout
    assert "the draft's GPU" not in together.stdout


def test_the_command_fails_with_the_number_to_change(tmp_path: Path) -> None:
    model = config_file(tmp_path, "70b", LLAMA_3_1_70B)
    result = CliRunner().invoke(app, ["plan", "--model", model, "--tp", "2", "--gpu-memory-gib", "70"])
    assert result.exit_code == 1
    assert result.stdout == ""


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    for text, problem in (("{", "cannot read"), ("[]", "holds no object")):
        broken.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_config(str(broken), tmp_path, lambda _: None)
