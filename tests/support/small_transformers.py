"""Small models of Hugging Face."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def gpt2(vocabulary: int = 30, attention: str = "sdpa", dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": vocabulary, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    settings = {"attn_implementation": attention, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, **settings))


def bert(kind: str = "SequenceClassification", labels: int = 3, attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    words = {"vocab_size": 50, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, **words, num_labels=labels, attn_implementation=attention)
    return getattr(transformers, f"BertFor{kind}")(config)
