"""Build architectures of the transformers package with random weights, and make up inputs for models of the package.

No weights are fetched. The seed is fixed, so a spec has the same weights in every process.
"""

import contextlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from autosplit.compat.models import missing_packages
from autosplit.errors import MissingExtraError, ModelCodeError, ModelError, close_names, one_line, raise_faults
from autosplit.examples.batch_norm import calibrate_batch_norm, tracking_norms
from autosplit.tables import bytes_text
from autosplit.tracing.modelspec import typed_options


class Given(NamedTuple):
    """Example inputs of a model: positional ones and those by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


DEFAULT_SEQ_LEN = 128
DEFAULT_IMAGE_SIZE = 224
CALIBRATION_IMAGE_SIZE = 224
AUDIO_SAMPLES = 16000
NUM_FRAMES = 200
FRAME_SIZES = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
"""Config fields that say how many features a frame of a sound has."""

MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
LOCAL_ATTENTION = ("", "eager", "sdpa", "flex_attention")
"""Attention implementations that come with torch; transformers fetches code from a hub for others."""

HUB_OPTIONS = ("trust_remote_code", "auto_map", "use_kernels", "kernel_config")
"""Options that make transformers load code which is not installed."""

RANDOM = (
    "RANDOM WEIGHTS: 'transformers:{}' has no trained weights, so its times count and its answers mean nothing; "
    "'transformers:/path/to/checkpoint' or 'hub:org/name' loads trained ones"
)
"""A note on each model that is built here."""

WAY_OUT = "Write a function that returns (module, inputs) and give it as 'file.py:function'."


def build(
    class_name: str, options: Mapping[str, str], batch: int, seq_len: int | None, given: Given | None = None, weights: bool = True
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build a model in eval mode, and example inputs by name unless they are given.

    Args:
        class_name: a model class, or a part of a model such as ``WhisperEncoder``.
        options: config fields as text, ``attn_implementation``, and ``image_size`` even if the config has none.
        batch: leading size of the inputs.
        seq_len: tokens, at most the positions of the config; by default 128 or that limit.
        weights: False if tensors are fake now.
        given: positional inputs and those by name. Batch norms are calibrated with them only if no others can be made up.
    Raises:
        MissingExtraError: transformers, or a package that this class needs, is not installed.
        ModelError: there is no such class or field, the model is larger than the free memory, or it takes other inputs.
    """
    model_class = find_class(class_name)
    subject = f"model 'transformers:{class_name}'"
    config, input_options = configure(model_class, options, subject)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            if weights:
                _require_memory(model_class, config, subject)
            module = with_random_weights(model_class, config)
        except ImportError as failure:
            raise MissingExtraError(f"{subject} needs a package that is not installed: {one_line(failure)}") from None
        except ModelError:
            raise
        except Exception as failure:
            raise ModelCodeError(f"{subject} cannot be built from this config: {one_line(failure)}") from failure
        shapes = Shapes(subject, config, inspect.signature(module.forward), input_options)
        if weights and tracking_norms(module):
            _calibrate(module, shapes, batch, seq_len, given)
        return module, shapes.inputs(module, batch, seq_len) if given is None else {}


def with_random_weights(model_class: Any, config: Any) -> nn.Module:
    """The model of a config in eval mode, in the dtype of the config."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(config, "dtype", None) or before)
    try:
        module: nn.Module = model_class(config).eval()
    finally:
        torch.set_default_dtype(before)
    return module


def _calibrate(module: nn.Module, shapes: "Shapes", batch: int, seq_len: int | None, given: Given | None) -> None:
    """Calibrate the batch norms with small images (7 times as fast for EfficientNet-B7), else full ones, else ``given``."""
    small = replace(shapes, largest_image=CALIBRATION_IMAGE_SIZE)
    with contextlib.suppress(Exception):
        calibrate_batch_norm(module, (), small.inputs(module, max(batch, 2), seq_len if given is None else None))
        return
    what = "the inputs made up for it"
    try:
        try:
            calibrate_batch_norm(module, (), shapes.inputs(module, max(batch, 2), seq_len if given is None else None))
        except Exception:
            if given is None:
                raise
            what = "its example inputs, with which its batch norms are calibrated"
            calibrate_batch_norm(module, *given)
    except ModelError:
        raise
    except Exception as failure:
        raise ModelError(f"{shapes.subject} fails on {what}: {one_line(failure)}. {WAY_OUT}") from failure


@dataclass(frozen=True, slots=True)
class Shapes:
    """Makes up inputs for a model of a config; images have at most ``largest_image`` pixels a side, if it is not 0."""

    subject: str
    config: Any
    signature: inspect.Signature
    options: Mapping[str, Any]
    largest_image: int = 0

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return self.signature.parameters

    def inputs(self, module: nn.Module, batch: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        """Random inputs by name: images, sounds, series in the dtype of the model, or token ids with a mask of ones."""
        main = self._main(module)
        found: dict[str, torch.Tensor] = {}
        if main == "input_ids":
            found |= self._tokens(batch, seq_len)
        elif main == "input_features":
            found[main] = torch.randn(batch, *self._sounds())
        elif main == "input_values":
            picture = self._given("max_length") + self._given("num_mel_bins")  # the spectrogram of a sound
            shape = picture if len(picture) == 2 else [*self._given("audio_channels"), AUDIO_SAMPLES]
            found[main] = torch.randn(batch, *shape)
        elif main == "past_values" and hasattr(self.config, "context_length"):
            found[main] = torch.randn(batch, self.config.context_length, *self._given("num_input_channels"))
        elif main != "pixel_values":
            raise self._no_example(main)
        sees = hasattr(self.config, "vision_config") and "pixel_values" in self.parameters
        if main == "pixel_values" or (sees and "image_grid_thw" not in self.parameters):  # else text alone: a grid decides shapes
            found["pixel_values"] = self._images(batch)
            if "input_ids" in found:
                found |= self._with_places(module, found, seq_len)
        if "decoder_input_ids" in self.parameters and self.config.is_encoder_decoder:
            found["decoder_input_ids"] = self._ids(batch, self._length(seq_len))
        elif seq_len is not None and "input_ids" not in found:
            raise ModelError(f"{self.subject} takes {', '.join(found)} and no tokens; leave the sequence length out")
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
        found = {name: one.to(dtype) if one.is_floating_point() else one for name, one in found.items()}
        try:
            self.signature.bind(**found)
        except TypeError as failure:
            named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
            required = {name for name, one in self.parameters.items() if one.kind in named and one.default is one.empty}
            if missing := required - found.keys():
                raise self._no_example(*sorted(missing)) from None
            raise ModelError(f"{self.subject} cannot be called with {', '.join(found)}: {failure}. {WAY_OUT}") from None
        return found

    def _main(self, module: nn.Module) -> str:
        """The main input of the class, or of the signature: a part of a model inherits that of the whole model."""
        main = getattr(module, "main_input_name", "input_ids")
        if isinstance(main, str) and main in self.parameters:
            return main
        return next((name for name in MAIN_INPUTS if name in self.parameters), str(main))

    def _given(self, field: str) -> list[int]:
        """The size of a dimension that only some models have, as a list of none or one."""
        return [getattr(self.config, field)] if hasattr(self.config, field) else []

    def _sounds(self) -> tuple[int, int]:
        """The shape of the features of a sound: mel bins by frames, as for Whisper, else frames by features of a frame."""
        config = self.config
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            return config.num_mel_bins, 2 * config.max_source_positions
        parts = [config, *(getattr(config, name) for name in ("encoder_config", "audio_config") if hasattr(config, name))]
        sizes = [getattr(part, name) for part in parts for name in FRAME_SIZES if isinstance(getattr(part, name, None), int)]
        if not sizes:
            raise self._no_example("input_features")
        return NUM_FRAMES, sizes[0]

    def _no_example(self, *names: str) -> ModelError:
        listed = ", ".join(f"'{name}'" for name in names)
        return ModelError(f"{self.subject} takes {listed}, for which no example input can be made up. {WAY_OUT}")

    def _tokens(self, batch: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        length = self._length(seq_len)
        found = {"input_ids": self._ids(batch, length)}
        if "attention_mask" in self.parameters and not self.config.is_encoder_decoder:
            found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        return found

    def _with_places(self, module: nn.Module, found: Mapping[str, torch.Tensor], seq_len: int | None) -> dict[str, torch.Tensor]:
        """The tokens, with one image token in front for each feature of the images, if the model counts them."""
        token, features = getattr(self.config, "image_token_id", None), getattr(module, "get_image_features", None)
        if token is None or features is None:
            return {}
        try:
            with torch.no_grad():
                made = features(found["pixel_values"]).pooler_output
        except Exception:  # the model needs more than images, such as their grids
            return {}
        batch = len(found["pixel_values"])
        count = sum(one.numel() // one.shape[-1] for one in made) // batch
        length = self._length(seq_len, count)
        tokens = self._tokens(batch, length)
        ids = tokens["input_ids"]
        ids[ids == token] = token - 1 if token else 1
        ids[:, :count] = token
        return tokens

    def _ids(self, batch: int, length: int) -> torch.Tensor:
        """Ids from the middle of the vocabulary, because special tokens are at its ends."""
        size = self._text("vocab_size", 2)
        return torch.randint(size // 8, max(size - size // 8, 1), (batch, length))

    def _length(self, seq_len: int | None, num_image: int = 0) -> int:
        """Tokens of an item, including those of an image."""
        limit = max(self._text("max_target_positions", None) or self._text("max_position_embeddings", 0), 0)  # XLNet: -1
        if seq_len is None:
            return min(num_image + DEFAULT_SEQ_LEN, limit or num_image + DEFAULT_SEQ_LEN)
        if seq_len <= num_image or (limit and seq_len > limit):
            raise ModelError(f"{self.subject} takes {num_image + 1} to {limit or 'any number of'} tokens, not {seq_len}")
        return seq_len

    def _text(self, field: str, default: Any) -> Any:
        return getattr(getattr(self.config, "text_config", None), field, None) or getattr(self.config, field, None) or default

    def _images(self, batch: int) -> torch.Tensor:
        config = getattr(self.config, "vision_config", self.config)
        size = self.options.get("image_size") or getattr(config, "image_size", None) or DEFAULT_IMAGE_SIZE
        sides = size if isinstance(size, list | tuple) else (size, size)
        height, width = (min(side, self.largest_image or side) for side in sides)
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        return torch.randn(batch, *frames, getattr(config, "num_channels", 3), height, width)


def find_class(class_name: str) -> Any:
    """A model class of transformers. Raises: ModelError: there is none. MissingExtraError: a package that it needs is missing."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(
            f"model 'transformers:{class_name}' needs the transformers package: pip install 'autosplit[transformers]'"
        ) from None
    found = getattr(transformers, class_name, None) or _find_part(class_name)
    if needed := missing_packages(found):  # a placeholder for a class whose packages are missing
        raise MissingExtraError(f"model 'transformers:{class_name}' needs packages that are not installed: {', '.join(needed)}")
    if not (isinstance(found, type) and issubclass(found, nn.Module) and getattr(found, "config_class", None)):
        known = [name for name in dir(transformers) if not name.endswith(("Config", "Processor"))]
        raise ModelError(f"transformers has no model class '{class_name}'{close_names(class_name, known)}")
    return found


def _find_part(class_name: str) -> Any:
    """A class in the module of a model family that the package does not list, such as WhisperEncoder."""
    models = import_module("transformers.models")
    families = [family.name for family in pkgutil.iter_modules(models.__path__)]
    for family in sorted(families, key=len, reverse=True):
        if class_name.lower().startswith(family.replace("_", "")):
            try:
                found = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), class_name, None)
            except ImportError:
                continue
            if found is not None:
                return found
    return None


def configure(
    model_class: Any, options: Mapping[str, str], subject: str, folder: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The config with the options set, and the options for the inputs only. ``folder`` holds the config of a checkpoint."""
    config_class = model_class.config_class
    made_of = partial(config_class.from_pretrained, folder, local_files_only=True) if folder else config_class
    default = made_of()
    renamed = {alias: getattr(default, alias, None) for alias in config_class.attribute_map}
    known = {**default.to_dict(), **renamed, "attn_implementation": ""}
    input_known = {} if "image_size" in known else {"image_size": DEFAULT_IMAGE_SIZE}
    values = typed_options(options, known | input_known, subject)
    raise_faults(ModelError, f"{subject} may not bring code from a model hub", hub_code({**options, **values}))
    input_values = {name: values.pop(name) for name in input_known if name in values}
    if "use_cache" in known:
        values.setdefault("use_cache", False)
    try:
        config = made_of(**values)
        _turn_off_caches(config, values)
        return config, input_values
    except Exception as failure:
        raise ModelError(f"{subject} refuses this config: {one_line(failure)}") from failure


def hub_code(options: Mapping[str, Any]) -> list[str]:
    """Name the options, nested ones too, for which transformers would fetch code and run it."""
    faults = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            faults += [f"{name}.{fault}" for fault in hub_code(value)]
        elif name.lstrip("_") == "attn_implementation" and value not in LOCAL_ATTENTION:
            faults.append(f"{name}={value!r:.60}: use {', '.join(LOCAL_ATTENTION[1:])}")
        elif name in HUB_OPTIONS:
            faults.append(f"{name}: leave it out, or write a function that returns (module, inputs)")
    return faults


@contextlib.contextmanager
def without_caches(module: Any) -> Iterator[int]:
    """Turn the key-value caches of a module's parts off for a block; give the number of configs that had one turned on."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    configs: dict[int, Any] = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    on = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in on:
        config.use_cache = False
    try:
        yield len(on)
    finally:
        for config in on:
            config.use_cache = True


def _turn_off_caches(config: Any, given: Mapping[str, Any]) -> None:
    """Turn caches off in the configs of all parts, unless the options turn them on."""
    for name in config.sub_configs:
        part, options = getattr(config, name, None), given.get(name) or {}
        if part is not None:
            if hasattr(part, "use_cache") and "use_cache" not in options:
                part.use_cache = False
            _turn_off_caches(part, options)


def _require_memory(model_class: Any, config: Any, subject: str) -> None:
    """Refuse a model that does not fit the free memory; the meta device tells its size without allocating it."""
    with torch.device("meta"):
        module = model_class(config)
    needed = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    free = psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"{subject} has {bytes_text(needed)} of weights, and {bytes_text(free)} of memory are free. "
            "Make it smaller, for example with '?num_hidden_layers=2'."
        )
