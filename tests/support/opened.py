# SPDX-License-Identifier: Apache-2.0
"""A model that stands for an open checkpoint. Not a test."""

from jax_paged.models import Decoder
from jax_paged.models.decoder.parameters import abstract_source


class Opened:
    """What `open_checkpoint` gives, of a model that is there already."""

    title = "a model of the tests"

    def __init__(self, model: Decoder, tokenizer=None):
        self.model, self.config, self.tokenizer = model, model.config, tokenizer

    def load(self):
        return self.model

    def load_and(self, work, on_loaded):
        work(Decoder(self.config, abstract_source(self.config)))
        on_loaded()
        return self.model
