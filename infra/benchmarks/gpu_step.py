"""Measure decode and verify steps of Llama-shaped models with random weights on one GPU.

    python infra/benchmarks/gpu_step.py [--json FILE] [--minutes 6]

Needs torch, transformers and numpy only. First the CUDA path is compared with the float32 CPU path on
a tiny model. Then, for B sequences of width W (1 = plain, 1 + K = verify), a step is timed as the
engine runs it: packed on the host, copied, replayed, and its greedy tokens copied back.
`--device cpu --tiny` runs everything on the CPU, to test the script.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "services"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.engine.attention import IMPLEMENTATION, register_attention
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.packing import pack_model
from outrider.engine.paged_batch import PagedKernel
from outrider.engine.paged_kernels import gathered_kernel, kernel_error, load_varlen_kernel
from outrider.engine.paged_steps import PagedOptions
from outrider.engine.shape import ModelShape
from outrider.engine.sizing import block_bytes
from outrider.engine.step_graphs import CudaRecorder, PlainRecorder, row_buckets
from outrider.engine.torch_engine import TorchEngine

BATCH_SIZES = (1, 8, 32)
WIDTHS = (1, 4, 8)
BLOCK_SIZE = 256
CHECK_TOLERANCE = 0.1
"""Largest difference of a logit to float32, in standard deviations of the logits (bfloat16)."""


def llama(**sizes: Any) -> LlamaConfig:
    return LlamaConfig(**{"max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_theta": 5e5, **sizes})


def models(tiny: bool) -> dict[str, LlamaConfig]:
    """What is measured. A rank of four holds a quarter of the heads and of the MLP, and all of the vocabulary."""
    if tiny:
        return {"tiny": tiny_config()}
    llama3 = {"head_dim": 128, "vocab_size": 128256}
    return {
        "1B draft": llama(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=128256,
        ),
        "8B": llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            **llama3,
        ),
        "70B, one of TP=4": llama(
            hidden_size=8192,
            intermediate_size=28672 // 4,
            num_hidden_layers=80,
            num_attention_heads=64 // 4,
            num_key_value_heads=8 // 4,
            **llama3,
        ),
    }


def tiny_config() -> LlamaConfig:
    return llama(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        initializer_range=0.1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how steps are run."""

    device: torch.device
    dtype: torch.dtype
    kernel: PagedKernel
    context: int
    """Positions before the step, of every sequence."""
    repeats: int
    deadline: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def blocks_per_sequence(self) -> int:
        return -(-(self.context + max(WIDTHS)) // BLOCK_SIZE)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def engine(self, config: LlamaConfig, model: Any) -> TorchEngine:
        shape = ModelShape.of_config(config)
        limits = EngineLimits(
            vocab_size=shape.vocab_size,
            max_model_len=shape.max_positions,
            num_blocks=max(max(BATCH_SIZES) * self.blocks_per_sequence, shape.max_positions // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        options = PagedOptions(
            kernel=self.kernel,
            max_width=max(WIDTHS),
            row_buckets=row_buckets(BATCH_SIZES, WIDTHS),
            recorder=CudaRecorder() if self.on_gpu else PlainRecorder(),
        )
        return TorchEngine(model, shape, limits, options)


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Any:
    register_attention()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    model.eval()
    return model


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def check(bench: Bench) -> dict[str, float]:
    """Compare with the float32 CPU path, same weights: prefill, rolled-back verify rows, mixed steps."""
    config = tiny_config()
    model = random_model(config, torch.float32, torch.device("cpu")).to(bench.dtype)
    reference = random_model(config, torch.float32, torch.device("cpu"))
    reference.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    model.to(bench.device)
    shape = ModelShape.of_config(config)
    for one in (model, reference):
        pack_model(one)
    engine = bench.engine(config, model)
    plain = TorchEngine(reference, shape, engine.limits)
    error = agreement = spread = rows = 0.0
    for batch in check_batches(config.vocab_size):
        actual, expected = engine.forward(batch).cpu(), plain.forward(batch)
        error = max(error, float((actual - expected).abs().nan_to_num(nan=float("inf")).max()))
        agreement += int((actual.argmax(1) == expected.argmax(1)).sum())
        spread, rows = float(expected.std()), rows + len(expected)
    kernel = kernel_error(
        bench.kernel, shape, dtype=bench.dtype, block_size=BLOCK_SIZE, max_keys=8192, device=bench.device
    )
    return {"error_in_std": error / spread, "argmax_agreement": agreement / rows, "kernel_error": kernel}


def check_batches(vocab_size: int) -> list[ForwardBatch]:
    first, second = tokens(700, vocab_size, 1), tokens(300, vocab_size, 2)

    def part(text: list[int], start: int, end: int, wanted: int, blocks: list[int]) -> ForwardSlice:
        return ForwardSlice(token_ids=text[start:end], start=start, block_table=blocks, num_logits=wanted)

    a, b = [7, 2, 9], [4, 1]
    steps = [
        (part(first, 0, 509, 3, a), part(second, 0, 250, 1, b)),
        (part(first, 509, 517, 8, a), part(second, 250, 251, 1, b)),
        (part(first, 512, 516, 4, a), part(second, 251, 259, 8, b)),
        (part(first, 516, 517, 1, a), part(second, 259, 260, 1, b)),
        (part(first, 517, 640, 5, a), part(second, 260, 264, 4, b)),
    ]
    return [ForwardBatch(slices=slices) for slices in steps]


def bandwidth(bench: Bench) -> float:
    """Bytes a second that the device reads: the best of several sums over far more than its caches hold."""
    count = 1 << (30 if bench.on_gpu else 24)
    data = torch.ones(count, dtype=torch.float32, device=bench.device)
    seconds = min(timed(bench, lambda: data.sum()) for _ in range(8))
    return count * data.element_size() / seconds


def timed(bench: Bench, act: Callable[[], object]) -> float:
    bench.wait()
    began = time.perf_counter()
    act()
    bench.wait()
    return time.perf_counter() - began


def weight_bytes(model: Any) -> int:
    """What a step reads: all weights but the embedding table, of which it reads a few rows."""
    table = model.get_input_embeddings().weight
    held = {id(one): one for module in model.modules() for one in module_tensors(module)}
    return sum(one.numel() * one.element_size() for one in held.values() if one is not table)


def module_tensors(module: Any) -> list[Tensor]:
    # Packed layers of the CPU keep their weight as a plain attribute.
    packed = getattr(module, "_weight", None)
    return [*module.parameters(recurse=False), *([packed] if isinstance(packed, Tensor) else [])]


def measure(bench: Bench, name: str, config: LlamaConfig, bytes_per_s: float) -> list[dict[str, Any]]:
    model = random_model(config, bench.dtype, bench.device)
    pack_model(model)
    weights = weight_bytes(model)
    engine = bench.engine(config, model)
    kv_position = block_bytes(ModelShape.of_config(config), block_size=1, dtype=bench.dtype)
    results = []
    for batch_size in BATCH_SIZES:
        for width in WIDTHS:
            if time.monotonic() > bench.deadline:
                return results
            step = decode_step(bench, config, batch_size, width)
            seconds = step_seconds(bench, engine, step)
            bound = (weights + batch_size * (bench.context + width) * kv_position) / bytes_per_s
            results.append(
                {
                    "model": name,
                    "batch": batch_size,
                    "width": width,
                    "step_ms": 1e3 * seconds,
                    "bound_ms": 1e3 * bound,
                    "share_of_bound": bound / seconds,
                }
            )
    engine.close()
    return results


def decode_step(bench: Bench, config: LlamaConfig, batch_size: int, width: int) -> ForwardBatch:
    per_sequence = bench.blocks_per_sequence
    return ForwardBatch(
        slices=tuple(
            ForwardSlice(
                token_ids=tokens(width, config.vocab_size, index),
                start=bench.context,
                block_table=range(index * per_sequence, (index + 1) * per_sequence),
                num_logits=width,
            )
            for index in range(batch_size)
        )
    )


def step_seconds(bench: Bench, engine: TorchEngine, step: ForwardBatch) -> float:
    """The median step, greedy tokens on the host included; the first ones record and warm up."""

    def run() -> None:
        engine.forward(step).argmax(1).tolist()

    for _ in range(3 if bench.on_gpu else 1):
        run()
    return statistics.median(timed(bench, run) for _ in range(bench.repeats))


def table(rows: list[dict[str, Any]]) -> str:
    """One line per model and batch: step times by width, share of the bound, and width 8 by width 1."""
    head = f"{'model':<18}{'B':>4}" + "".join(f"{f'W={w} ms':>10}{'bound':>7}" for w in WIDTHS) + f"{'W8/W1':>8}"
    lines = [head]
    for name, batch in dict.fromkeys((one["model"], one["batch"]) for one in rows):
        found = {one["width"]: one for one in rows if (one["model"], one["batch"]) == (name, batch)}
        line = f"{name:<18}{batch:>4}"
        for width in WIDTHS:
            one = found.get(width)
            line += f"{one['step_ms']:>10.2f}{one['share_of_bound']:>7.0%}" if one else f"{'-':>10}{'-':>7}"
        ratio = found[8]["step_ms"] / found[1]["step_ms"] if {1, 8} <= found.keys() else None
        lines.append(line + (f"{ratio:>8.2f}" if ratio else f"{'-':>8}"))
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--minutes", type=float, default=6.0, help="start no new measurement after this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of the real sizes")
    return parser.parse_args()


def build_bench(options: argparse.Namespace) -> Bench:
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    kernel = load_varlen_kernel() if on_gpu else gathered_kernel
    if kernel is None:
        sys.exit(f"torch {torch.__version__} has no torch.nn.attention.varlen")
    return Bench(
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        kernel=kernel,
        context=1024 if not options.tiny else 40,
        repeats=20 if on_gpu else 2,
        deadline=time.monotonic() + 60 * options.minutes,
    )


def report(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    checked = check(bench)
    print(f"against the float32 CPU path: {checked}", flush=True)
    bytes_per_s = bandwidth(bench)
    print(f"memory: {bytes_per_s / 1e9:.0f} GB/s read", flush=True)
    rows: list[dict[str, Any]] = []
    for name, config in models(options.tiny).items():
        began = time.monotonic()
        rows += measure(bench, name, config, bytes_per_s)
        gc.collect()
        if bench.on_gpu:
            torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    device = torch.cuda.get_device_name(bench.device) if bench.on_gpu else "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "context": bench.context,
        "bandwidth_gb_s": bytes_per_s / 1e9,
        "check": checked,
        "rows": rows,
    }


def main() -> int:
    options = arguments()
    bench = build_bench(options)
    with torch.inference_mode():
        result = report(options, bench)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    allowed = CHECK_TOLERANCE if bench.on_gpu else 1e-3
    if not result["check"]["error_in_std"] < allowed:
        print(f"the logits are off by {result['check']['error_in_std']:.3g} standard deviations")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
