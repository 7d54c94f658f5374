"""A tiny real language model as a checkpoint folder, with tokeniser and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def tiny_llama(folder: Path, *, seed: int = 0, tied: bool = True, words: Sequence[str] = (), end: str = "") -> None:
    """Writes it. ``words``: the first of its vocabulary; ``end``: the one that ends an answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=words.index(end) if end else None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far from uniform, so that greedy choices differ from each other
    model.save_pretrained(folder)
    named = [*words, *(f"w{index}" for index in range(len(words), 63)), "[UNK]"]
    tokeniser = Tokenizer(models.WordLevel({word: index for index, word in enumerate(named)}, unk_token="[UNK]"))
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokeniser, unk_token="[UNK]", **({"eos_token": end} if end else {}))
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fast.save_pretrained(folder)
