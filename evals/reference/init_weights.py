"""Step-0 weights, drawn by the reference implementation itself.

OLMo-core draws them on CPU from one `torch.Generator` seeded with `model.init_seed` (sheet section 1.6), and
its own exporter writes them as HF safetensors, fp32, all padded vocabulary rows kept. The draw on a GPU
differs, so these are not the weights of a published run.
"""

import hashlib
from pathlib import Path

from model.config import ModelConfig


def write_init(
    model: ModelConfig, out: str | Path, *, context_length: int, eos_id: int = 100257, pad_id: int = 100277
) -> str:
    """Write the initial weights of `model` to directory `out`; returns sha256 of `model.safetensors`."""
    from evals.reference.olmo_core_model import build_initialised, export_hf

    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    built = build_initialised(model, context_length)
    export_hf(built, model, out, context_length=context_length, eos_id=eos_id, pad_id=pad_id)
    return weights_digest(out)


def weights_digest(hf_dir: Path) -> str:
    """sha256 over the safetensors files of `hf_dir`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(hf_dir.glob("*.safetensors")):
        with path.open("rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
