"""A tiny real language model as a checkpoint folder, with tokeniser and chat template."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_llama(folder: Path, *, seed: int = 0, tied: bool = True) -> None:
    """Writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far from uniform, so that greedy choices differ from each other
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(63)} | {"[UNK]": 63}
    tokeniser = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokeniser, unk_token="[UNK]")
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fast.save_pretrained(folder)
