# SPDX-License-Identifier: Apache-2.0
"""Models over paged KV, from published checkpoints to text, and parts for models of your own."""

# ruff: noqa: E402
from ._packages import check_installed as _check_installed

# jinja2 and tqdm are imported where they are used.
_check_installed("flax", "safetensors", "tokenizers")

from .checkpoint.hf_config import config_from_hf as config_from_hf
from .checkpoint.peft import load_adapter as load_adapter
from .checkpoint.weights import default_checkpoint as default_checkpoint
from .checkpoint.weights import load_checkpoint as load_checkpoint
from .checkpoint.weights import tensor_source as tensor_source
from .decoder.adapters import Adapter as Adapter
from .decoder.adapters import with_adapter as with_adapter
from .decoder.config import DecoderConfig as DecoderConfig
from .decoder.generation import Generation as Generation
from .decoder.generation import create_state as create_state
from .decoder.generation import generate as generate
from .decoder.merge_adapter import merge_adapter as merge_adapter
from .decoder.model import Decoder as Decoder
from .decoder.parameters import TensorSource as TensorSource
from .decoder.partition import make_mesh as make_mesh
from .decoder.parts import Attention as Attention
from .decoder.parts import DenseMLP as DenseMLP
from .decoder.parts import ExpertsMLP as ExpertsMLP
from .decoder.parts import rms_norm as rms_norm
from .decoder.placement import Balance as Balance
from .decoder.protocol import Model as Model
from .decoder.protocol import ModelConfig as ModelConfig
from .decoder.protocol import merge_model as merge_model
from .decoder.protocol import split_model as split_model
from .decoder.stream import TextStream as TextStream
from .distributed.processes import Processes as Processes
from .distributed.processes import start_processes as start_processes
from .evaluation.likelihoods import LogLikelihood as LogLikelihood
from .evaluation.likelihoods import loglikelihoods as loglikelihoods
from .evaluation.likelihoods import rolling_loglikelihoods as rolling_loglikelihoods
from .evaluation.perplexity import evaluate as evaluate
from .evaluation.scores import score as score
from .evaluation.scores import token_logits as token_logits
from .serving import structured as structured
from .serving.decode_engine import DecodeEngine as DecodeEngine
from .serving.engine import Engine as Engine
from .serving.engine import Request as Request
from .serving.handover import PrefillTicket as PrefillTicket
from .serving.prefill import PrefillService as PrefillService
from .serving.prefiller import Prefiller as Prefiller
from .serving.runner import follow as follow
from .serving.sessions import Session as Session
from .serving.sessions import Sessions as Sessions
from .serving.snapshot import SnapshotFile as SnapshotFile
from .testing import Stepper as Stepper
