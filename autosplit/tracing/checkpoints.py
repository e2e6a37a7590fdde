"""Load a checkpoint of transformers from a folder or the hub: safetensors files, mapped and read where they are used.

Only ``config.json`` and safetensors files are read. Pickled weights and code of a repository are not.
"""

import contextlib
import ctypes
import inspect
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from torch import nn

from autosplit.errors import MissingExtraError, ModelCodeError, ModelError, UsageError, one_line, raise_faults
from autosplit.files import read_data
from autosplit.parsing import parse_json, shown
from autosplit.tables import bytes_text
from autosplit.tracing import architectures
from autosplit.tracing.architectures import Given
from autosplit.tracing.tensorspec import laid_out, spec_of

FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""Patterns of the files that are fetched from the hub, from the top folder of a repository."""


def load_checkpoint(
    folder: Path,
    origin: str,
    options: Mapping[str, str],
    batch: int,
    seq_len: int | None,
    given: Given | None,
    weights: bool = True,
) -> tuple[nn.Module, str, Given, str]:
    """The model of a checkpoint in eval mode, in its own dtypes.

    Args:
        folder: holds ``config.json`` and safetensors files.
        origin: the user's name for it, for messages.
        options: config fields as text, and ``image_size`` even if the config has none.
        batch, seq_len, given, weights: as for ``architectures.build``.
    Returns: the model, its name, inputs that were made up for it, and a note on its weights.
    Raises: ModelError: it is not a checkpoint, lacks weights, or its class is not one of transformers. MissingExtraError: no
        transformers.
    """
    subject, files = f"model '{origin}'", sorted(folder.glob("*.safetensors"))
    try:
        config = read_data(folder / "config.json", "config", UsageError, parse_json)
    except UsageError as failure:
        raise ModelError(f"{subject} is not a checkpoint: {failure}") from None
    if weights and not files:
        raise ModelError(
            f"{subject}: '{folder}' holds no safetensors file, and pickled weights, which can run code, are not read; "
            "save_pretrained of a model writes safetensors"
        )
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{subject}: its config.json names no architecture: {shown(names)}")
    faults = architectures.hub_code({key: value for key, value in config.items() if key != "auto_map"})
    raise_faults(ModelError, f"{subject} may not bring code from a model hub", faults)
    model_class = architectures.find_class(names[0])
    with _quiet():
        made, input_options = architectures.configure(model_class, options, subject, str(folder))
        try:
            if weights:
                module, found = model_class.from_pretrained(
                    str(folder), config=made, use_safetensors=True, local_files_only=True, output_loading_info=True
                )
            else:
                module, found = architectures.with_random_weights(model_class, made), {}
        except ImportError as failure:
            raise MissingExtraError(f"{subject} needs a package that is not installed: {failure}") from None
        except Exception as failure:
            raise ModelCodeError(f"{subject} cannot be loaded: {one_line(failure)}") from failure
    lost = [f"it lacks '{name}'" for name in sorted(found.get("missing_keys", ()))]
    lost += [f"'{name[0]}' has another shape than its config says" for name in sorted(found.get("mismatched_keys", ()))]
    raise_faults(ModelError, f"{subject} does not hold all weights of {names[0]}", lost)
    note = ""
    if weights:
        _align(module)
        sizes = [file.stat() for file in files]
        written = datetime.fromtimestamp(max(one.st_mtime for one in sizes)).isoformat(" ", "minutes")
        num_bytes = bytes_text(sum(one.st_size for one in sizes))
        note = f"weights: those of '{origin}' ({names[0]}, {num_bytes} in {len(files)} safetensors files, written {written})"
    shapes = architectures.Shapes(subject, made, inspect.signature(module.forward), input_options)
    return module.eval(), names[0], Given((), shapes.inputs(module, batch, seq_len) if given is None else {}), note


def fetch(name: str) -> Path:
    """The folder of a repository on the hub (``org/name``, ``org/name@revision``), fetched unless it is here already.

    Raises: ModelError: it cannot be fetched. MissingExtraError: no package to fetch it with.
    """
    repository, _, revision = name.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError(
            f"model 'hub:{name}' needs the transformers package: pip install 'autosplit[transformers]'"
        ) from None
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=["*/*"]
        )
    except Exception as failure:
        reason = one_line(failure).partition(". ")[0].rstrip(".")  # the package's own advice follows
        way_out = "without a network, give a folder: 'transformers:/path/to/checkpoint'"
        raise ModelError(f"model 'hub:{name}' cannot be fetched: {reason}; {way_out}") from None
    return Path(folder)


def _align(module: nn.Module) -> None:
    """Put each weight on a 64-byte boundary, where a trace needs it, and give back the pages of the file that it was copied from.

    The pages are clean and file-backed, so that the process never holds the checkpoint twice. Aligned weights stay mapped.
    """
    mapped = [span for span in map(_file_span, Path("/proc/self/maps").read_text().splitlines()) if span is not None]
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for tensor in [*module.parameters(), *module.buffers()]:
        old = tensor.data
        tensor.data = laid_out(old, replace(spec_of("", old), offset_bytes=0))
        first = -(-old.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (old.data_ptr() + old.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        is_copied = tensor.data_ptr() != old.data_ptr()
        if is_copied and length > 0 and any(start <= first and first + length <= end for start, end in mapped):
            madvise(first, length, mmap.MADV_DONTNEED)


def _file_span(line: str) -> tuple[int, int] | None:
    """The addresses of a mapped safetensors file in a line of ``/proc/self/maps``."""
    start, _, end = line.partition(" ")[0].partition("-")
    return (int(start, 16), int(end, 16)) if line.rstrip().endswith(".safetensors") else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and remarks from stderr for a block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
