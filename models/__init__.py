"""Models over paged KV: Qwen3-MoE, dense Qwen3 and Llama, from published checkpoints to text."""

from .config import DecoderConfig as DecoderConfig
from .config import config_from_hf as config_from_hf
from .decoder import Decoder as Decoder
from .weights import default_checkpoint as default_checkpoint
from .weights import load_checkpoint as load_checkpoint
