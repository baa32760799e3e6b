"""How long a forward pass takes on hardware that is not there.

Step time = max(weight bytes / bandwidth, FLOPs / peak) + KV bytes / bandwidth + collectives + launch:
a roofline, with two efficiencies that are calibrated, not measured.

Sources. H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16, NVLink 450 GB/s each way (NVIDIA H100 data sheet).
Models: the `config.json` of meta-llama/Llama-3.1-70B-Instruct and Llama-3.2-1B-Instruct.
Assumptions: 8 µs for one small all-reduce over NVSwitch, 0.2 ms (70B) and 0.15 ms (1B) to launch a step
as a graph, 60 % of the peak FLOP/s for large steps.
Calibration: `memory_efficiency` is chosen so that a verify step of the 70B with 8 rows takes 13.5 ms
and a step of the 1B with one row takes 1.2 ms, the reference costs of the design.
"""

from dataclasses import dataclass, replace

from outrider.core.errors import ConfigError

__all__ = ["DeviceProfile", "HardwareProfile", "ModelSizes", "h100_llama_1b", "h100_tp4_llama_70b", "slowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A group of equal accelerators that share one model."""

    num_devices: int
    """Tensor-parallel ranks."""
    memory_bytes_per_s: float
    """Peak memory bandwidth of one device."""
    peak_flops: float
    """Peak dense FLOP/s of one device in the model's number format."""
    link_bytes_per_s: float
    """Bandwidth from one device to the others, one way."""
    memory_efficiency: float
    """Reached share of the peak bandwidth."""
    compute_efficiency: float
    """Reached share of the peak FLOP/s."""
    all_reduce_latency_s: float
    """One all-reduce of a few rows; 0 rows more cost nothing more."""
    launch_s: float
    """The host's part of a step, which depends on nothing: launches, sampling, synchronisation."""

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ConfigError(f"num_devices: {self.num_devices} is below 1")
        for name in ("memory_bytes_per_s", "peak_flops", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        for name in ("memory_efficiency", "compute_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is outside (0, 1]")
        for name in ("all_reduce_latency_s", "launch_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a forward pass reads and computes, from a model's configuration."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    """Of the model that is emulated; it sizes the output projection alone."""
    bytes_per_value: int = 2
    """Of weights, activations and KV."""

    @property
    def weights(self) -> int:
        """Parameters that a step reads: all but the input embedding, of which it reads single rows."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size) + (
            self.hidden_size * self.vocab_size
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A model on its hardware."""

    name: str
    hardware: HardwareProfile
    model: ModelSizes

    def step_s(self, *, rows: int, kv_tokens: int = 0) -> float:
        """Seconds of one forward over `rows` token rows that attend to `kv_tokens` positions in all."""
        hardware, model = self.hardware, self.model
        bandwidth = hardware.num_devices * hardware.memory_bytes_per_s * hardware.memory_efficiency
        compute = hardware.num_devices * hardware.peak_flops * hardware.compute_efficiency
        weights_s = model.weights * model.bytes_per_value / bandwidth
        flops_s = 2 * model.weights * rows / compute
        kv_s = kv_tokens * model.kv_bytes_per_token / bandwidth
        return max(weights_s, flops_s) + kv_s + self._collectives_s(rows) + hardware.launch_s

    def _collectives_s(self, rows: int) -> float:
        """Two ring all-reduces of the hidden states per layer."""
        ranks = self.hardware.num_devices
        if ranks == 1:
            return 0.0
        sent = 2 * (ranks - 1) / ranks * rows * self.model.hidden_size * self.model.bytes_per_value
        one = self.hardware.all_reduce_latency_s + sent / self.hardware.link_bytes_per_s
        return 2 * self.model.num_layers * one


def h100_tp4_llama_70b() -> DeviceProfile:
    """Llama-3.1-70B in bf16 over four H100 SXM in one NVLink box."""
    return DeviceProfile(
        name="H100-SXM TP4 + Llama-70B bf16",
        hardware=_h100(num_devices=4, memory_efficiency=0.868, launch_s=0.2e-3),
        model=ModelSizes(
            num_layers=80,
            hidden_size=8192,
            intermediate_size=28672,
            heads=64,
            kv_heads=8,
            head_dim=128,
            vocab_size=128256,
        ),
    )


def h100_llama_1b() -> DeviceProfile:
    """Llama-3.2-1B in bf16 on one H100 SXM."""
    return DeviceProfile(
        name="H100-SXM + Llama-1B bf16",
        hardware=_h100(num_devices=1, memory_efficiency=0.7025, launch_s=0.15e-3),
        model=ModelSizes(
            num_layers=16,
            hidden_size=2048,
            intermediate_size=8192,
            heads=32,
            kv_heads=8,
            head_dim=64,
            vocab_size=128256,
        ),
    )


def slowed(profile: DeviceProfile, factor: float) -> DeviceProfile:
    """The same model on hardware on which every step takes `factor` times as long.

    Raises `ConfigError` when `factor` is not above 0.
    """
    if not factor > 0:
        raise ConfigError(f"slowdown: {factor} is not above 0")
    if factor == 1:
        return profile
    hardware = profile.hardware
    return replace(
        profile,
        name=f"{profile.name}, {factor:g} times slower",
        hardware=replace(
            hardware,
            memory_bytes_per_s=hardware.memory_bytes_per_s / factor,
            peak_flops=hardware.peak_flops / factor,
            link_bytes_per_s=hardware.link_bytes_per_s / factor,
            all_reduce_latency_s=hardware.all_reduce_latency_s * factor,
            launch_s=hardware.launch_s * factor,
        ),
    )


def _h100(*, num_devices: int, memory_efficiency: float, launch_s: float) -> HardwareProfile:
    return HardwareProfile(
        num_devices=num_devices,
        memory_bytes_per_s=3.35e12,
        peak_flops=989e12,
        link_bytes_per_s=450e9,
        memory_efficiency=memory_efficiency,
        compute_efficiency=0.6,
        all_reduce_latency_s=8e-6,
        launch_s=launch_s,
    )
