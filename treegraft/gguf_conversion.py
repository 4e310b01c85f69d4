"""Turns a GGUF file into a folder that transformers can load."""

import errno
import io
import mmap
import os
import struct
from contextlib import redirect_stderr
from pathlib import Path

from treegraft.errors import UserError, is_disk_full, one_line


def convert_gguf(name: str, gguf: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and save it as bfloat16 safetensors with its config and tokenizer."""
    try:
        import gguf as _  # noqa: F401  (transformers needs it, and would say so less plainly)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise UserError(f"model '{name}': reading a GGUF file needs the package gguf: `pip install gguf`") from error
    from treegraft.models import quiet_transformers

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"model '{name}': {gguf} is not a GGUF file")
    try:
        # transformers draws a progress bar of its own here that its logging settings do not reach.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                # Without it transformers keeps the weights packed wherever it has a kernel for them, and cannot save
                # them.
                quantization_config=GgufConfig(dequantize=True),
            )
            # The weights are plain now; with this entry left in, saving refuses and loading would look for packed
            # weights.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            ends = {model.config.eos_token_id, tokenizer.eos_token_id, _end_of_turn(gguf)} - {None}
            model.generation_config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # a damaged or unknown file fails anywhere inside transformers, with any type
        if is_disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UserError(f"model '{name}': {gguf} cannot be converted ({one_line(error)})") from error


def _end_of_turn(gguf: Path) -> int | None:
    """The id of the token that ends a chat turn: a GGUF key beside the end of text, which transformers does not read.

    The key is searched for in the file: parsing the header once more would take seconds (it holds the whole
    vocabulary).
    """
    key = b"tokenizer.ggml.eot_token_id"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 4)  # its length, itself, and the type uint32
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(entry)
        return None if start < 0 else struct.unpack_from("<I", content, start + len(entry))[0]
