"""A head to begin with: the target's own output head and norms, and layers that first pass features through."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.distill.eagle3_batches import CommonPrefix
from outrider.distill.vocabulary import DraftVocabulary
from outrider.engine.eagle3.config import Eagle3Shape, default_feature_layers
from outrider.engine.eagle3.model import Eagle3Head

__all__ = ["features_of_prefix", "head_config", "new_head"]

_SMALL = 0.3
"""Of the usual spread, for what is added to the residual stream: the head starts close to its input."""


def head_config(target: Any, vocabulary: DraftVocabulary) -> Mapping[str, Any]:
    """config.json of a head for a target of this Hugging Face configuration, in the published format.

    All query heads have keys and values of their own: the token reaches the residual stream through
    values alone, which with a few shared heads would be a narrow way. The MLP gives some room for it.
    """
    layers = default_feature_layers(target.num_hidden_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": max(64, target.intermediate_size * 5 // 6 // 64 * 64),
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_attention_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": dict(target.rope_parameters),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
        "dtype": "bfloat16",
    }


@torch.no_grad()
def new_head(shape: Eagle3Shape, target: Any, vocabulary: DraftVocabulary, *, seed: int) -> Eagle3Head:
    """A head whose output rows and last norm are the target's, the rows not to be trained.

    `target` is a transformers causal language model, and `shape` as wide as it (`head_config`). The fusing
    layer starts by passing the highest feature through, which already lies close to what the last norm expects.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(shape)
    decoder = target.get_decoder()
    head.d2t.copy_(vocabulary.token_ids - torch.arange(len(vocabulary)))
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary.token_ids].float())
    head.lm_head.weight.requires_grad_(False)
    head.norm.weight.copy_(decoder.norm.weight.float())
    last = decoder.layers[-1]
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight.float())
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight.float())
    nn.init.zeros_(head.fc.weight)
    head.fc.weight[:, 2 * shape.target_hidden_size :] = torch.eye(shape.hidden_size)
    head.midlayer.self_attn.o_proj.weight.mul_(_SMALL)
    head.midlayer.mlp.down_proj.weight.mul_(_SMALL)
    return head


@torch.inference_mode()
def features_of_prefix(target: Any, ids: Tensor) -> CommonPrefix:
    """What the target says about the tokens [p] that stand before every text; on the target's device."""
    layers = default_feature_layers(target.config.num_hidden_layers)
    ids = ids.long().to(target.get_input_embeddings().weight.device)
    states = target.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.stack([states[layer][0] for layer in layers], dim=1).to(torch.bfloat16)
    return CommonPrefix(ids=ids, features=features.clone())
