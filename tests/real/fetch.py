"""Take real models from the Hugging Face hub: each as a GGUF file and as a directory.

``python -m tests.real.fetch DIR [FILE ...]``. A FILE is taken from this machine. The directory is
what transformers reads in the GGUF file, in bfloat16, so that both have the same weights.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

REPOSITORIES = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "ggml-org/gemma-3-270m-GGUF": "gemma-3-270m-Q8_0.gguf",
}


def fetched(folder: Path) -> list[Path]:
    """Download the files; return their places."""
    import huggingface_hub

    return [
        Path(huggingface_hub.hf_hub_download(repository, name, local_dir=folder))
        for repository, name in REPOSITORIES.items()
    ]


def write_directory(file: Path) -> Path:
    """Write the model beside its file, as transformers stores it; return the directory."""
    import transformers

    target = file.with_suffix("")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="GGUF files that are copied to DIR")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    taken = [Path(shutil.copy(file, options.folder)) for file in options.files]
    for file in taken or sorted(options.folder.glob("*.gguf")) or fetched(options.folder):
        if not file.with_suffix("").is_dir():
            print(f"writing {write_directory(file)}")


if __name__ == "__main__":
    main()
