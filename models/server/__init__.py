# SPDX-License-Identifier: Apache-2.0
"""`jax-paged serve`: the engine behind HTTP, by the API of OpenAI. Needs the extra `serve`."""
