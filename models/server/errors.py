# SPDX-License-Identifier: Apache-2.0
"""What a client is told when something is wrong, in the shape that OpenAI's clients read."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .wire import as_json

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with a status and {"error": {message, type, param, code}}.

    Args:
      status: 4xx where the client is wrong, 5xx where the server cannot.
      message: one line: argument, expected, got.
      param: the field of the body, as a path.
      code: a word for programs.
      headers: of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": " ".join(str(self).split()),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The HTTP response."""
        return Response(
            as_json(self.body()), self.status, self.headers, media_type="application/json"
        )


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 for a field of the body."""
    return ApiError(400, message, param=param, code=code)


async def _api_error(_: Request, error: Any) -> Response:
    return error.response()


async def _http_error(_: Request, error: Any) -> Response:
    message = {404: "there is no such page", 405: "this page takes another method"}
    return ApiError(
        error.status_code, message.get(error.status_code, str(error.detail)),
        headers=dict(error.headers or {}),
    ).response()  # fmt: skip


async def _our_error(_: Request, error: Exception) -> Response:
    return ApiError(500, "the server has made a mistake", code="internal_error").response()


HANDLERS: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _our_error}
