"""Models over paged KV: Qwen3-MoE, dense Qwen3 and Llama, from published checkpoints to text."""

# ruff: noqa: E402
import importlib.util

_NEEDED = ("flax", "jinja2", "safetensors", "tokenizers", "tqdm")
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise ImportError(
        f"jax_paged.models: {', '.join(_missing)} not installed; get all that it needs with: "
        "pip install 'jax_paged[models]'"
    )

from .config import DecoderConfig as DecoderConfig
from .decoder import Decoder as Decoder
from .evaluate import evaluate as evaluate
from .evaluate import score as score
from .generate import Generation as Generation
from .generate import generate as generate
from .hf_config import config_from_hf as config_from_hf
from .weights import default_checkpoint as default_checkpoint
from .weights import load_checkpoint as load_checkpoint
