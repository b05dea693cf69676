"""The dolma toolkit in an environment of its own (its pins contradict ours): make it, run it, compare with it.

    python tests/benchmarks/dolma_toolkit.py make ENV         create the environment (needs the package registry)
    python tests/benchmarks/dolma_toolkit.py fixture ENV      run it on the stored fixture and compare byte by byte

Its requirements are installed without resolution, because pip cannot resolve them beside `numpy<2`.
"""

import filecmp
import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from data.config import TokenizerConfig
from data.tokenizer import tokenizer_file

PACKAGES = [
    "dolma==1.2.1",
    "tokenizers==0.19.1",
    "numpy==1.26.4",
    "huggingface-hub==0.29.3",
    "smart-open",
    "msgspec",
    "omegaconf",
    "antlr4-python3-runtime==4.9.3",
    "pyyaml",
    "necessary",
    "requirements-parser",
    "tqdm",
    "rich",
    "requests",
    "urllib3",
    "idna",
    "certifi",
    "charset-normalizer",
    "python-dotenv",
    "platformdirs",
    "wrapt",
    "filelock",
    "fsspec",
    "packaging",
    "typing-extensions",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "zstandard",
    "backports.zstd",
    "boto3",
    "botocore",
    "s3transfer",
    "jmespath",
    "python-dateutil",
    "six",
    "s3fs",
    "aiohttp",
    "aiobotocore",
    "anyascii",
    "jq",
    "jsonpath-ng",
    "ply",
    "uniseg",
    "nltk",
    "click",
    "regex",
    "joblib",
    "fasttext-wheel",
]
FIXTURE = Path(__file__).parent.parent / "data" / "fixtures" / "dolma"
RUN = """
import sys, warnings
warnings.filterwarnings("ignore")
from dolma.tokenizer.executor import tokenize_in_parallel
if __name__ == "__main__":
    tokenizer, out, processes, shuffle, *sources = sys.argv[1:]
    tokenize_in_parallel(
        sources=sources, destination=out, metadata_dir=out + "-meta", num_writers=int(processes),
        local_shuffle=int(shuffle), tokenizer_name_or_path=tokenizer, eos_token_id=100257, pad_token_id=100277,
        dtype="uint32", max_size=100_000_000,
    )
"""


def command(
    python: str, sources: list[str], out: Path, processes: int = 1, local_shuffle: int = 10_000
) -> list[str]:
    """The command line that tokenizes `sources` into `out` with the toolkit."""
    script = Path(tempfile.gettempdir()) / "dolma_run.py"
    script.write_text(RUN)
    tokenizer = str(tokenizer_file(TokenizerConfig()))
    return [python, str(script), tokenizer, str(out), str(processes), str(local_shuffle), *sources]


def make(env: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    subprocess.run(
        [str(env / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True
    )
    print(f"export DOLMA_PYTHON={env / 'bin/python'}")


def fixture(env: Path) -> None:
    """Run the toolkit on the stored documents; it must write the stored bytes."""
    with tempfile.TemporaryDirectory() as tmp:
        shutil.copy(FIXTURE / "input.jsonl.gz", tmp)
        run = command(str(env / "bin/python"), ["input.jsonl.gz"], Path("out"), local_shuffle=1)
        subprocess.run(run, check=True, cwd=tmp, capture_output=True)
        out = Path(tmp, "out")
        same = filecmp.cmp(out / "part-0-00000.npy", FIXTURE / "tokens.npy", shallow=False)
        ours, theirs = FIXTURE / "boundaries.csv.gz", out / "part-0-00000.csv.gz"
        same = same and gzip.decompress(ours.read_bytes()) == gzip.decompress(theirs.read_bytes())
    print(
        "the toolkit writes the stored bytes"
        if same
        else "the toolkit writes OTHER bytes than the stored ones"
    )
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    {"make": make, "fixture": fixture}[sys.argv[1]](Path(sys.argv[2]))
