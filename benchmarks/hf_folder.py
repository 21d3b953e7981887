"""Convert a model, such as a .gguf file, to a folder in Hugging Face's format, for programs that read only that.

    python benchmarks/hf_folder.py SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2

Runs where spanformer is installed. The folder holds the unpacked weights and the tokenizer.
"""

import argparse
from pathlib import Path

import torch

from spanformer.hf.text import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder in Hugging Face's format, a .gguf file or a folder with one")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"out is {options.out}, which is not empty; choose a new folder")
    try:
        model, tokenizer = load_model(options.model, getattr(torch, options.dtype))
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
