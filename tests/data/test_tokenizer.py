"""The tokenizer: both engines give equal ids on hostile text; identity by digest; no fork hazard."""

import os
import pickle
import random
import subprocess
import sys
import unicodedata

import pytest

from data.config import TokenizerConfig
from data.tokenizer import Tokenizer, hostile_sample, load_tokenizer
from infra.errors import DataError, IdentityError


@pytest.fixture(scope="module")
def engines():
    cfg = TokenizerConfig()
    return load_tokenizer(cfg, "fastokens"), load_tokenizer(cfg, "tokenizers")


def hostile_strings(count, seed=0):
    """Random strings of specials, runs, controls, combining marks, digits, spaces and any Unicode plane."""
    rng = random.Random(seed)
    specials = [
        "<|endoftext|>",
        "<|pad|>",
        "<|im_start|>",
        "|||PHONE_NUMBER|||",
        "<|endoftext",
        "|>",
        "'S",
        "'ll",
    ]
    planes = [(0, 0x80), (0x80, 0x250), (0x300, 0x370), (0x590, 0x700), (0x900, 0xE80), (0x1E00, 0x2070)]
    planes += [(0x2100, 0x2200), (0x3000, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFE00, 0xFFFE)]
    planes += [
        (0x10000, 0x10400),
        (0x1D400, 0x1D800),
        (0x1F000, 0x1FB00),
        (0x20000, 0x20100),
        (0xE0000, 0xE0200),
    ]
    made = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(0, 12)):
            kind = rng.random()
            if kind < 0.15:
                parts.append(rng.choice(specials))
            elif kind < 0.35:
                parts.append(rng.choice(" \n\r\t\v\f\u00a0\u2003\u3000\x00\x1f\x7f\x85") * rng.randint(1, 9))
            elif kind < 0.5:
                parts.append(rng.choice("aZ0=é中'-_") * rng.randint(1, 40))
            else:
                low, high = rng.choice(planes)
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 8))))
        made.append("".join(parts))
    return made


def test_the_fast_engine_is_in_use(engines):
    fast, slow = engines
    assert (fast.backend, fast.fallback, slow.backend) == ("fastokens", "", "tokenizers")
    assert load_tokenizer(TokenizerConfig()).backend == "fastokens"


@pytest.mark.parametrize("policy", ["special", "text"])
def test_both_engines_agree_on_20000_hostile_strings(policy):
    cfg = TokenizerConfig(literal_eos=policy)
    fast, slow = load_tokenizer(cfg, "fastokens"), load_tokenizer(cfg, "tokenizers")
    strings = hostile_sample() + hostile_strings(20_000 if policy == "special" else 3000)
    for start in range(0, len(strings), 1000):
        part = strings[start : start + 1000]
        a, b = fast.encode_batch(part), slow.encode_batch(part)
        different = [s for s, x, y in zip(part, a, b) if x != y]
        assert not different, different[:3]


def test_ids_are_those_of_hugging_face_and_decode_back(engines):
    import tokenizers

    engine = tokenizers.Tokenizer.from_file(str(engines[0].path))
    for text in ("Hello world", "naïve 中文", "a<|endoftext|>b", unicodedata.normalize("NFD", "éü")):
        expected = engine.encode(text, add_special_tokens=False).ids
        assert engines[0].encode(text) == engines[1].encode(text) == expected
        assert engines[0].decode(expected) == text
    assert engines[0].encode("") == []


def test_literal_eos_policies():
    assert load_tokenizer(TokenizerConfig()).encode("a<|endoftext|>") == [64, 100257]
    text = load_tokenizer(TokenizerConfig(literal_eos="text")).encode("a<|endoftext|>")
    assert 100257 not in text and len(text) > 2
    assert load_tokenizer(TokenizerConfig()).eos_text == "<|endoftext|>"


def test_another_file_or_size_is_refused(tmp_path):
    other = tmp_path / "tokenizer.json"
    other.write_text(load_tokenizer(TokenizerConfig()).path.read_text() + " ")
    with pytest.raises(IdentityError, match="has the sha256"):
        Tokenizer(TokenizerConfig(file=str(other)))
    with pytest.raises(DataError, match="does not exist"):
        Tokenizer(TokenizerConfig(file=str(tmp_path / "none.json")))
    whole = load_tokenizer(TokenizerConfig()).path.read_bytes()
    for damaged in (b"{}", whole.replace(b"a", b"\xff", 1)):
        other.write_bytes(damaged)  # a replaced letter would change ids in silence
        with pytest.raises(DataError, match="is no tokenizer"):
            Tokenizer(TokenizerConfig(file=str(other), sha256=""))
    with pytest.raises(IdentityError, match="100278 entries"):
        Tokenizer(TokenizerConfig(vocab_size=100352))


def test_a_differing_fast_engine_is_not_used(monkeypatch):
    tokenizer = Tokenizer(TokenizerConfig())
    plain = tokenizer._encode_fast

    def wrong(texts):
        ids, offsets = plain(texts)
        ids = ids.copy()
        ids[5] += 1
        return ids, offsets

    monkeypatch.setattr(Tokenizer, "_encode_fast", lambda self, texts: wrong(texts))
    assert "differ on the sample" in tokenizer.self_check()
    found = Tokenizer(TokenizerConfig())
    assert found.backend == "tokenizers" and "differ" in found.fallback
    assert found.encode("a<|endoftext|>b") == [64, 100257, 65]
    with pytest.raises(DataError, match="cannot be used"):
        Tokenizer(TokenizerConfig(), "fastokens")


FORK = """
import os
from data.config import TokenizerConfig
from data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(TokenizerConfig(), "{engine}")
before = tokenizer.encode_batch(["warm up"] * 64)
child = os.fork()
if child == 0:
    ok = load_tokenizer(TokenizerConfig(), "{engine}").encode_batch(["warm up"] * 64) == before
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_encoding_in_a_forked_child_does_not_block(engine):
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    code = FORK.format(engine=engine)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert out.stdout.strip() == "0", out.stderr[-500:]


def test_configurations_are_hashable_and_pickle():
    cfg = TokenizerConfig()
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert load_tokenizer(cfg) is load_tokenizer(TokenizerConfig())
