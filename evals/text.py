"""The tokenizer as evaluation needs it: no BOS, no stripping, and the UTF-8 length of every token.

dolma2 is a byte-level BPE: each character of a vocabulary entry stands for one byte, so that the bytes of a
token are the length of its entry. Special tokens count 0 bytes. The surprising thing: a literal
`<|endoftext|>` in an evaluation prompt is encoded as the EOS id, as lm-eval's HF model does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.config import TokenizerConfig


class TextTokenizer:
    """Encode and decode with the tokenizer of a recipe. `digest` is the sha256 of its file."""

    def __init__(self, cfg: TokenizerConfig):
        from data.tokenizer import load_tokenizer

        self.inner = load_tokenizer(cfg.model_copy(update={"literal_eos": "special"}))
        self.eos_id, self.pad_id, self.vocab_size = cfg.eos_id, cfg.pad_id, cfg.vocab_size
        self.name, self.digest = cfg.name, self.inner.digest

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` and nothing else."""
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens kept."""
        return self.inner.decode(ids)

    def byte_lengths(self, classes: int) -> np.ndarray:
        """int64[classes]: UTF-8 bytes of each id; 0 for special tokens and for padding classes."""
        out = np.zeros(classes, np.int64)
        engine = self.inner.reference
        special = special_ids(engine)
        for entry, i in engine.get_vocab(with_added_tokens=True).items():
            if i < classes and i not in special:
                out[i] = len(entry)
        return out


def special_ids(inner: Any) -> set[int]:
    """Ids of added special tokens."""
    return {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
