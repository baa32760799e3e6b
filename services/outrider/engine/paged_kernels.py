"""Paged attention kernels, and which of them an engine can use.

`varlen_kernel` is torch's own (`torch.nn.attention.varlen`, FlashAttention 2 inside). Its limits in
torch 2.13: pages of a multiple of 256 positions; float16 or bfloat16; head sizes that are multiples of
8 up to 256; and split keys give wrong rows unless every sequence is a single query whose heads share KV
heads (pytorch issue 194167), so everything else runs with one split.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.paged_batch import PagedKernel, PagedRows
from outrider.engine.shape import ModelShape

__all__ = ["gathered_kernel", "kernel_error", "load_varlen_kernel", "unsupported"]

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_AMPERE = 8
# Sequences of the trial below, in keys: one key, within a page, at its end, over several pages.
_TRIAL_KEYS = (1, 77, 256, 257, 700, 1023)
_TRIAL_CHUNK = 5


def unsupported(shape: ModelShape, *, dtype: torch.dtype, block_size: int, device: torch.device) -> str | None:
    """Why torch's paged kernel cannot run such a model there; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype is {str(dtype).removeprefix('torch.')}, not bfloat16 or float16"
    if shape.head_dim % _HEAD_DIM_MULTIPLE or shape.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}, not a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}"
    if block_size % _PAGE_MULTIPLE:
        return f"block_size is {block_size}, not a multiple of {_PAGE_MULTIPLE}"
    if torch.cuda.get_device_capability(device)[0] < _AMPERE:
        return "the GPU is older than Ampere"
    return None


def load_varlen_kernel() -> PagedKernel | None:
    """Torch's paged kernel, or None where the installed torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    def varlen_kernel(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
        shares_heads = query.shape[1] > keys.shape[2]
        single = rows.max_rows == 1
        output = varlen_attn(
            query,
            keys,
            values,
            rows.cu_seq_q,
            rows.cu_seq_k,
            rows.max_rows,
            rows.max_keys,
            scale=scaling,
            # A single query sees all keys: without a causal window the kernel puts the heads that
            # share a KV head into one tile, and reads those keys once.
            window_size=(-1, -1) if single else (-1, 0),
            enable_gqa=shares_heads,
            seqused_k=rows.seqused_k,
            block_table=rows.block_table,
            num_splits=None if single and shares_heads else 1,
        )
        return output[0] if isinstance(output, tuple) else output

    return varlen_kernel


def gathered_kernel(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
    """The same attention sequence by sequence, for any device and type; waits for the device."""
    starts = rows.cu_seq_q.tolist()
    outputs = []
    for index, num_keys in enumerate(rows.seqused_k.tolist()):
        table = rows.block_table[index, : -(-num_keys // keys.shape[1])]
        # [heads, rows, head_dim] and [kv_heads, keys, head_dim]
        asked = query[starts[index] : starts[index + 1]].transpose(0, 1)
        key, value = (pool[table.long()].flatten(0, 1)[:num_keys].transpose(0, 1) for pool in (keys, values))
        count = asked.shape[1]
        seen = torch.ones(count, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - count)
        outputs.append(scaled_dot_product_attention(asked, key, value, attn_mask=seen, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1)


@torch.inference_mode()
def kernel_error(
    kernel: PagedKernel, shape: ModelShape, *, dtype: torch.dtype, block_size: int, max_keys: int, device: torch.device
) -> float:
    """Largest difference of `kernel` to `gathered_kernel` in float32 on a trial, both ways of packing.

    Values are standard normal. An engine tries its kernel before it trusts it: what is wrong here
    would be silently wrong text.
    """
    lengths = [length for length in _TRIAL_KEYS if length <= max_keys]
    generator = torch.Generator().manual_seed(1)
    pages = -(-max(lengths) // block_size)
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages)
    pool = torch.randn(2, table.numel(), block_size, shape.kv_heads, shape.head_dim, generator=generator)
    keys, values = pool.to(device, dtype).unbind()
    worst = 0.0
    for counts in ([1] * len(lengths), [min(_TRIAL_CHUNK, length) for length in lengths]):
        query = torch.randn(sum(counts), shape.heads, shape.head_dim, generator=generator).to(device, dtype)
        rows = _trial_rows(counts, lengths, table, max_keys=max_keys, device=device)
        scaling = shape.head_dim**-0.5
        actual = kernel(query, keys, values, rows, scaling)
        expected = gathered_kernel(query.float(), keys.float(), values.float(), rows, scaling)
        # A NaN has to count as wrong, which max() of floats does not promise.
        difference = (actual.float() - expected).abs().nan_to_num(nan=float("inf")).max()
        worst = max(worst, float(difference))
    return worst


def _trial_rows(
    counts: list[int], lengths: list[int], table: Tensor, *, max_keys: int, device: torch.device
) -> PagedRows:
    def starts(sizes: list[int]) -> Tensor:
        return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)

    return PagedRows(
        cu_seq_q=starts(counts),
        cu_seq_k=starts(lengths),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device, torch.int32),
        max_rows=max(counts),
        max_keys=max_keys,
    )
