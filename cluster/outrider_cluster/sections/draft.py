"""The section `draft`."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic import model_validator as validator

from outrider_cluster.sections.base import CudaSettings, DType, KvSettings, Scaled, with_paged_blocks

__all__ = ["SELF_DRAFT", "DraftSettings"]

SELF_DRAFT = "self"
"""The draft's model name that stands for the target's own weights."""


class DraftSettings(Scaled):
    """The draft: an accelerator that the target never depends on."""

    enabled: bool = True
    method: Literal["draft_model", "eagle3"] = "draft_model"
    """eagle3: `model` is an EAGLE-3 head, a folder or hub id in the published format. It reads features
    that the target stores beside its KV, 2 bytes x hidden size for each position of the pool, and drafts
    on request only."""
    model: str = Field(default=SELF_DRAFT, min_length=1)
    """As `model.name`; `self` drafts with the target's own weights, which with `quantization`
    gives a cheaper copy of the target where no smaller sibling exists."""
    dtype: DType = "bfloat16"
    quantization: Literal["none", "int4"] = "none"
    """int4: weights are quantised when they are loaded."""
    max_model_len: PositiveInt | None = None
    """Longest text that the draft holds; default: the target's. Longer texts decode plainly."""
    kv: KvSettings = KvSettings()
    max_num_seqs: PositiveInt = 256
    """Most sequences that one replica holds, over all its targets."""
    threads: PositiveInt = 1
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: Literal[0, 1] = 0
    cuda: CudaSettings = CudaSettings()

    @validator(mode="before")
    @classmethod
    def _paged_blocks(cls, section: Any) -> Any:
        return with_paged_blocks(section, on_gpu=isinstance(section, dict) and bool(section.get("num_gpus")))
