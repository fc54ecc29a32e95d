# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints: config.json, safetensors, GGUF and tokenizers, each field checked."""
