"""Models over paged KV: Qwen3-MoE, dense Qwen3 and Llama, from published checkpoints to text."""

# ruff: noqa: E402
from ._packages import check_installed as _check_installed

# jinja2 and tqdm are imported where they are used.
_check_installed("flax", "safetensors", "tokenizers")

from .config import DecoderConfig as DecoderConfig
from .decoder import Decoder as Decoder
from .engine import Engine as Engine
from .engine import Request as Request
from .evaluation import evaluate as evaluate
from .evaluation import score as score
from .generation import Generation as Generation
from .generation import create_state as create_state
from .generation import generate as generate
from .hf_config import config_from_hf as config_from_hf
from .stream import TextStream as TextStream
from .testing import Stepper as Stepper
from .weights import default_checkpoint as default_checkpoint
from .weights import load_checkpoint as load_checkpoint
