"""The errors of the API, and strict validation of the fields of a request."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends with the first wrong item: an error for each of 100,000 takes seconds to build."""


class ApiError(Exception):
    """An error for the client, in OpenAI's shape: {"error": {message, type, param, code}}."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 1,
        **extra: Any,
    ):
        """retry_after: seconds after which a request with status 429 or 503 may be repeated; extra: further fields."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code, **extra}}

    def renamed(self, rename: Callable[[str], str]) -> "ApiError":
        """The error with another name for its parameter."""
        told, param = self.body["error"], self.body["error"]["param"]
        if param is not None:
            told["param"] = rename(param)
            told["message"] = told["message"].replace(f"'{param}'", f"'{told['param']}'")
        return self


def invalid(param: str, why: object) -> ApiError:
    """The error for a parameter with a wrong value."""
    return ApiError(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


class Strict(BaseModel):
    """A part of a request: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    instead: ClassVar[Mapping[str, str]] = {}
    """The correct usage of a parameter, where pydantic's message does not name it."""
