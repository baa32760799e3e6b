"""A model engine over several ranks: rank 0 decides, the others follow its commands.

Every rank is a process of its own and builds its part with `build_rank`; rank 0 gets a
`TensorParallelEngine`, the others a `TensorParallelPeer` whose loop they run. Each step is one
broadcast of integers, then the same forward on every rank, whose layers add up their parts.

While it loads, a rank reads the whole checkpoint: the weights are mapped from its files, whose pages
all ranks of a machine share, and AutoTP copies this rank's shards out of them (onto the GPU, where
there is one). The peak per rank is thus its shard, the embedding and the head, plus one layer; the
page cache holds the checkpoint once, and may drop it again.

Ranks of a GPU must choose alike how they attend: they record their graphs in step, reductions included.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.engine.autotp import shard_model
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.config import EngineConfig
from outrider.engine.cuda_path import paged_options, use_device
from outrider.engine.eagle3.build import build_capture
from outrider.engine.eagle3.capture import FeatureCapture
from outrider.engine.factory import limits_for, torch_dtype
from outrider.engine.forward_threads import ForwardThreads, compute_alone
from outrider.engine.loading import load_causal_lm, load_config
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.engine.packing import pack_model
from outrider.engine.rank_group import RankGroup, backend_for
from outrider.engine.rendezvous import Rendezvous
from outrider.engine.runner import ModelRunner
from outrider.engine.shape import ModelShape
from outrider.engine.step_codec import BlockCopies, Stop, decode_command, encode_copies, encode_step, encode_stop

__all__ = ["TensorParallelEngine", "TensorParallelPeer", "build_peer", "build_primary"]


class TensorParallelEngine:
    """Rank 0's `ModelEngine`. After `EngineUnavailable` the whole group has to be built anew."""

    def __init__(self, runner: ModelRunner, group: RankGroup, limits: EngineLimits) -> None:
        """Take over a runner whose layers sum over `group`."""
        self._runner = runner
        self._group = group
        self._limits = limits
        self._ended: str | None = None
        self._closed = False

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold; on every rank the same."""
        return self._limits

    @property
    def features(self) -> FeatureCapture | None:
        """Implements `engine.features.HasFeatures`. Rank 0 has whole rows: layers reduce what they give."""
        return self._runner.features

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one ragged forward pass on all ranks: see `ModelEngine.forward`.

        Raises `ValueError` for a batch outside the limits, before any rank hears of it, and
        `EngineUnavailable` when a rank is gone or late, then and ever after.
        """
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        forward = self._runner.lay_out(batch)
        with self._ending_on_failure():
            self._group.send_command(encode_step(batch, self._limits.block_size))
            return self._runner.logits(self._runner.hidden(forward))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks on all ranks: see `ModelEngine.copy_blocks`. Raises as `forward`."""
        if self._ended is not None:
            raise EngineUnavailable(self._ended)
        self._runner.check_blocks(pairs)
        with self._ending_on_failure():
            self._group.send_command(encode_copies(pairs))
            self._runner.copy_blocks(pairs)

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (EngineUnavailable, RuntimeError) as error:
            # Whatever failed in the middle of a step: the ranks no longer agree where they are.
            failure = error if isinstance(error, EngineUnavailable) else self._group.failure(error)
            self._ended = failure.cause
            raise failure from error

    def close(self) -> None:
        """End the other ranks' loops and leave the group. Closing again changes nothing."""
        if self._closed:
            return
        self._closed = True
        if self._ended is None:
            self._ended = "the engine was closed"
            # A rank that is gone needs no telling, and the rest notice the broken connection.
            with suppress(EngineUnavailable):
                self._group.send_command(encode_stop())
        self._group.close()


class TensorParallelPeer:
    """Rank 1 or above: runs what rank 0 commands."""

    def __init__(self, runner: ModelRunner, group: RankGroup) -> None:
        """Take over a runner whose layers sum over `group`."""
        self._runner = runner
        self._group = group

    def serve_forever(self) -> None:
        """Run commands until rank 0 says stop, then leave the group.

        Raises `EngineUnavailable` when another rank is gone or late; the process should then end.
        """
        while self._obey(decode_command(self._group.receive_command())):
            pass
        self._group.close()

    def _obey(self, command: ForwardBatch | BlockCopies | Stop) -> bool:
        """Run one command; False after the last."""
        match command:
            case ForwardBatch():
                self._step(command)
            case BlockCopies():
                self._runner.copy_blocks(command.pairs)
            case Stop():
                return False
        return True

    def _step(self, batch: ForwardBatch) -> None:
        forward = self._runner.lay_out(batch)
        try:
            self._runner.hidden(forward)
        except RuntimeError as error:
            raise self._group.failure(error) from error


def build_primary(config: EngineConfig, rendezvous: Rendezvous, progress: Progress) -> TensorParallelEngine:
    """Rank 0's engine; waits for the other ranks, which call `build_peer` meanwhile.

    Raises `ConfigError` or `CompatibilityError` naming what cannot work, and `EngineUnavailable`
    when a rank does not come.
    """
    if rendezvous.rank != 0:
        raise ConfigError(f"rank: the primary is rank 0, not {rendezvous.rank}")
    runner, group, limits = _build_rank(config, rendezvous, progress)
    return TensorParallelEngine(runner, group, limits)


def build_peer(config: EngineConfig, rendezvous: Rendezvous, progress: Progress) -> TensorParallelPeer:
    """The part of rank 1 or above, ready for `serve_forever`. Raises as `build_primary` does."""
    if rendezvous.rank == 0:
        raise ConfigError("rank: rank 0 is the primary")
    runner, group, _ = _build_rank(config, rendezvous, progress)
    return TensorParallelPeer(runner, group)


def _agreed_limits(config: EngineConfig, whole: ModelShape, dtype: torch.dtype, group: RankGroup) -> EngineLimits:
    """Every rank has as many KV blocks as rank 0, whose device carries most."""
    if group.rank == 0:
        limits = limits_for(config, whole, dtype)
        group.send_command([limits.num_blocks])
        return limits
    num_blocks = group.receive_command()[0]
    return limits_for(replace(config, num_blocks=num_blocks, kv_bytes=None), whole, dtype)


def _build_rank(
    config: EngineConfig, rendezvous: Rendezvous, progress: Progress
) -> tuple[ModelRunner, RankGroup, EngineLimits]:
    if config.tensor_parallel_size != rendezvous.world_size:
        raise ConfigError(f"tensor_parallel_size: {config.tensor_parallel_size}, but {rendezvous.world_size} ranks")
    compute_alone()
    folder = resolve(config.model, config.cache_dir, progress)
    dtype = torch_dtype(config)
    hf_config = load_config(folder)
    whole = ModelShape.of_config(hf_config)
    if rendezvous.rank == 0:
        # Before the weights are read: a setting that cannot work should say so at once.
        limits_for(config, whole, dtype)
    model = load_causal_lm(folder, dtype)
    device = use_device(config.device)
    # The slow and fallible work comes first: whoever meets the others is nearly ready.
    group = RankGroup(rendezvous, backend=backend_for(device), timeout_s=config.peer_timeout_s)
    limits = _agreed_limits(config, whole, dtype, group)
    shard_model(model, group, dtype)
    shape = ModelShape.of_model(model)
    model.to(device=device)  # type: ignore[call-arg]
    pack_model(model)
    features = None
    if rendezvous.rank == 0:
        features = build_capture(config, hf_config, limits, device=device, progress=progress)
    # Recording graphs at start-up already sums over the group: nobody may be late for it.
    group.wait_for_all()
    options = paged_options(config, shape, limits, dtype, device)
    runner = ModelRunner(model, shape, limits, options, features, ForwardThreads(config.threads))
    # Otherwise the first step would count a slower rank's preparation as its being late.
    group.wait_for_all()
    return runner, group, limits
