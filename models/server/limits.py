# SPDX-License-Identifier: Apache-2.0
"""The bounds of a server, in one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes from its clients at most.

    max_body_bytes: of one body; max_bodies_bytes: of all that are being read.
    body_seconds: for a client to send its body.
    max_prompt_tokens: of one prompt; None = the model's context.
    max_choices: answers to one request, prompts times n.
    max_queue: answers that wait beside the engine's rows; then 429.
    max_connections: at once.
    stall_seconds: a client that does not read for so long has gone.
    drain_seconds: for running requests when the server ends.
    max_schema_bytes: of a JSON schema or regular expression.
    prepare_seconds: for a chat template, schema or regular expression.
    """

    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 256 << 20
    body_seconds: float = 30.0
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    max_queue: int = 256
    max_connections: int = 2048
    stall_seconds: float = 60.0
    drain_seconds: float = 30.0
    max_schema_bytes: int = 64 << 10
    prepare_seconds: float = 5.0
