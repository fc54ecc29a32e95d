"""The KV cache: which row holds which pages, and the pages of all layers with it."""
