"""Families of Hugging Face's models, small and with random weights, as their classes are. Nothing is downloaded.

By default some of them in training mode, with dropout; `make test-slow` runs all, in both modes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import CLASSES, Case
from outside_checks import CHECKS

pytestmark = pytest.mark.filterwarnings("ignore:Samples mix")  # the derivatives are right all the same

transformers = pytest.importorskip("transformers")
BATCH, WORDS, TOKENS = 3, 31, 8
SOME = ("llama", "t5", "vit")

COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = COMMON | {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED: dict[str, Any] = {"num_key_value_heads": 1}  # heads share their keys and values
HEADS = SHARED | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
STATE = {"state_size": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LAYER = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
PAIR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART = PAIR | {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "image_size": 16}
PYRAMID = STAGES | {"num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2]}
WINDOWS = {"embed_dim": 8, "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 2, "patch_size": 2}
CONVOLUTIONS = {"conv_dim": [8, 8], "conv_kernel": [5, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
SPEECH = CONVOLUTIONS | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
UNMASKED = SPEECH | {"apply_spec_augment": False}  # its masks come from numpy's generator
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "causal": {
        "gpt2": {}, "gpt_neox": {}, "gptj": {"rotary_dim": 4}, "bloom": {}, "falcon": {}, "mpt": {}, "biogpt": {},
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 3},
        "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16}, "codegen": {"rotary_dim": 4, "num_attention_heads": 4},
        "llama": SHARED, "mistral": SHARED, "qwen2": SHARED, "qwen3": HEADS, "gemma": HEADS, "gemma2": HEADS,
        "gemma3_text": HEADS, "phi": SHARED, "phi3": SHARED, "cohere": SHARED, "olmo2": SHARED, "granite": SHARED,
        "stablelm": SHARED, "starcoder2": SHARED, "smollm3": SHARED, "nemotron": SHARED, "glm": HEADS,
        "ernie4_5": HEADS, "mixtral": SHARED | EXPERTS, "qwen3_moe": HEADS | EXPERTS,
        "gpt_oss": HEADS | EXPERTS | {"sliding_window": 4},
        "deepseek_v3": ROUTED | LATENT | {"first_k_dense_replace": 1}, "mamba": STATE, "falcon_mamba": STATE,
        "mamba2": STATE | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        "jamba": SHARED | LAYER | {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
        "bamba": SHARED | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "attn_layer_indices": [1]},
        "recurrent_gemma": SHARED | {"lru_width": 16, "attention_window_size": 4}, "lfm2": SHARED,
        "rwkv": {"attention_hidden_size": 16}, "openai-gpt": {}, "ctrl": {"dff": 24, "n_positions": 16},
    },
    "classes": {
        "bert": {}, "roberta": {}, "camembert": {}, "mpnet": {}, "megatron-bert": {}, "ernie": {},
        "luke": {"entity_vocab_size": 9, "entity_emb_size": 8},
        "distilbert": {"hidden_dim": 24}, "albert": {"embedding_size": 8}, "electra": {"embedding_size": 8},
        "mobilebert": {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}, "fnet": {},
        "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "ibert": {}, "yoso": {},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "xlnet": {"d_head": 8, "d_inner": 24},
        "modernbert": {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, "canine": {}, "xlm": {},
        "convbert": {"embedding_size": 16, "conv_kernel_size": 3, "num_groups": 1, "head_ratio": 1},
        "squeezebert": {"embedding_size": 16}, "longformer": {"attention_window": 4},
        "big_bird": {"attention_type": "original_full"}, "roformer": {"embedding_size": 16},
        "rembert": {"input_embedding_size": 8, "output_embedding_size": 8},
    },
    "sequences": {
        **dict.fromkeys(("bart", "mbart", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart"), BART),
        "marian": BART | {"decoder_start_token_id": 0}, **dict.fromkeys(("t5", "mt5", "umt5"), T5),
        "switch_transformers": T5 | {"num_experts": 2}, "longt5": T5 | {"local_radius": 4},
    },
    "images": {
        "vit": {}, "beit": {}, "dinov2": {}, "vit_msn": {}, "ijepa": {}, "swin": WINDOWS, "swinv2": WINDOWS,
        "convnext": STAGES | {"num_stages": 2}, "convnextv2": STAGES | {"num_stages": 2},
        "resnet": STAGES | {"layer_type": "basic"}, "bit": STAGES | {"num_groups": 2},
        "regnet": STAGES | {"groups_width": 4}, "focalnet": WINDOWS | {"focal_levels": [1, 1]},
        "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": 32},
        "segformer": PYRAMID | {"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]},
        "poolformer": PYRAMID | {"padding": [1, 1]},
    },
    "sounds": {
        **dict.fromkeys(("wav2vec2", "hubert", "unispeech"), UNMASKED),
        "wavlm": UNMASKED | {"num_buckets": 8, "max_bucket_distance": 16}, "sew": UNMASKED | {"squeeze_factor": 1},
        "whisper": BART | {"num_mel_bins": 8, "max_source_positions": 10},
    },
}  # fmt: skip
KINDS = {name: kind for kind, families in FAMILIES.items() for name in families}
MODELS = {"causal": "CausalLM", "classes": "SequenceClassification", "sequences": "Seq2SeqLM"} | {
    "images": "ImageClassification",
    "sounds": "AudioClassification",
}


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch):
    """Norms, softmax and positions ask for float32 by name: differences need float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    transformers.logging.set_verbosity_error()


def classes(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets, reduction="none")


def words(outputs: Any, targets: Tensor) -> Tensor:
    """Next words, or those of a decoder: the mean over a sample."""
    logits = outputs.logits[:, : targets.shape[1]]
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def case(name: str, *, training: bool) -> Case:
    """A model in float64 whose weights are no round numbers, and a batch; a padded one, of tokens."""
    kind, sizes = KINDS[name], COMMON | {"num_labels": CLASSES, "image_size": 8, "patch_size": 4}
    sizes |= TEXT | {"use_cache": False} if kind in ("causal", "classes", "sequences") else {}
    sizes |= FAMILIES[kind][name]
    if "depths" in sizes:
        del sizes["num_hidden_layers"]
    config = transformers.AutoConfig.for_model(name, **sizes)
    make = getattr(transformers, f"AutoModelFor{MODELS[kind]}").from_config
    model = make(config, experts_implementation="eager").double().train(training)  # the other has no float64
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    tokens, mask = torch.randint(3, WORDS, (BATCH, TOKENS)), torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, 6:] = 0
    labels, inputs = torch.randint(CLASSES, (BATCH,)), {"input_ids": tokens, "attention_mask": mask}
    if kind == "causal":
        return Case(model, inputs, tokens[:, 1:], words)
    if kind == "sequences":
        return Case(model, inputs | {"decoder_input_ids": tokens.flip(1)}, tokens, words)
    if kind == "images":
        inputs = {"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size).double()}
    elif kind == "sounds":
        inputs = {"input_values": torch.randn(BATCH, 80).double()}
        inputs = {"input_features": torch.randn(BATCH, 8, 20).double()} if name == "whisper" else inputs
    return Case(model, inputs, labels, classes)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SOME)
def test_some_families(name: str, check: str):
    CHECKS[check](case(name, training=True))


@pytest.mark.sweep
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", KINDS)
def test_every_family(name: str, training: bool):
    made = case(name, training=training)
    for check in CHECKS.values():
        check(made)
