"""Models of transformers and peft for `published.py`, from small configurations with random weights."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from published_data import CLASSES, COUNT, IMAGES, KINDS, LABELS, SOUND, TOKENS, WORDS, Entry

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def hugging(kind: str, head: str = "ForSequenceClassification", config: str | None = None, **changes: Any) -> Any:
    """A model of transformers from a small configuration."""

    def make() -> nn.Module:
        library = import_module("transformers")
        own = getattr(library, f"{config or kind}Config")(**{**SIZES, **changes})
        made: nn.Module = getattr(library, kind + head)(own)
        return made

    return make


def low_rank() -> nn.Module:
    """BERT with LoRA on its queries and values; the rest is frozen but for the classifier."""
    peft = import_module("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
    made: nn.Module = peft.get_peft_model(hugging("Bert")(), config)
    return made


MODELS = {
    "BERT": Entry("transformers", hugging("Bert"), {"input_ids": TOKENS, "token_type_ids": KINDS, "labels": LABELS}),
    "BERT with its own loss": Entry("transformers", hugging("Bert", num_hidden_layers=1), WORDS, {"loss": "own"}),
    "RoBERTa": Entry("transformers", hugging("Roberta"), WORDS),
    "ALBERT": Entry("transformers", hugging("Albert", embedding_size=16), WORDS),
    "DistilBERT": Entry("transformers", hugging("DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=2), WORDS),
    "ELECTRA": Entry("transformers", hugging("Electra", embedding_size=16), WORDS),
    "GPT-2": Entry("transformers", hugging("GPT2", n_embd=32, n_layer=2, n_head=2), WORDS),
    "GPT-2 as a language model": Entry(
        "transformers",
        hugging("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=2),
        {"input_ids": TOKENS, "labels": TOKENS},
    ),
    "Llama": Entry("transformers", hugging("Llama"), WORDS),
    "Mixtral": Entry("transformers", hugging("Mixtral", num_local_experts=4), WORDS),
    "T5": Entry(
        "transformers",
        hugging(
            "T5",
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            eos_token_id=1,
            decoder_start_token_id=0,
        ),
        {"input_ids": torch.cat([TOKENS, torch.ones(COUNT, 1, dtype=torch.long)], 1), "labels": LABELS},
    ),
    "T5 as a translator": Entry(
        "transformers",
        hugging(
            "T5",
            "ForConditionalGeneration",
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        {"input_ids": TOKENS, "labels": TOKENS[:, :4].flip(1).contiguous()},
        {"loss": "own"},
    ),
    "Mamba": Entry(
        "transformers", hugging("Mamba", "ForCausalLM", state_size=4), {"input_ids": TOKENS, "labels": TOKENS}
    ),
    "Hugging Face's ViT": Entry(
        "transformers",
        hugging("ViT", "ForImageClassification", image_size=32, patch_size=8),
        {"pixel_values": IMAGES, "labels": LABELS},
    ),
    "Wav2Vec2": Entry(
        "transformers",
        hugging(
            "Wav2Vec2",
            conv_dim=(8, 8),
            conv_stride=(5, 4),
            conv_kernel=(10, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
            layerdrop=0.0,
            classifier_proj_size=16,
        ),
        {"input_values": SOUND, "labels": LABELS},
    ),
    "LoRA": Entry("peft", low_rank, WORDS),
}
