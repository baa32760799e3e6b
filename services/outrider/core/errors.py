"""Errors that cross a boundary. `rpc.errors` maps each class to one gRPC status, in one table."""

from collections.abc import Callable, Mapping

__all__ = [
    "CompatibilityError",
    "ConfigError",
    "DeadlineExceeded",
    "DuplicateRequest",
    "EngineUnavailable",
    "InvalidRequest",
    "ModelNotFound",
    "OutriderError",
    "Overloaded",
    "ProtocolError",
    "RequestAborted",
    "Unauthenticated",
    "Unsupported",
]


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose.

    Survives pickling as it is, so a subclass may take whatever arguments it likes. An exception is
    pickled by its message otherwise, with which its class is called again: one with fields would come
    back as a `TypeError`, or with its words twice.
    """

    def __reduce__(self) -> tuple[Callable[..., "OutriderError"], tuple[object, ...]]:
        return _restored, (type(self), self.args, self.__dict__)


class InvalidRequest(OutriderError):
    """A request field is out of range. The client has to change the request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Unsupported(InvalidRequest):
    """A field of the contract that this deployment cannot honour, so it refuses it by name."""


class ModelNotFound(OutriderError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model: {model!r} is not served here; this deployment serves {served!r}")
        self.model = model
        self.served = served


class Unauthenticated(OutriderError):
    """The call carries no API key, or one that is not known here. Says nothing about which keys are."""


class DuplicateRequest(OutriderError):
    """A request with this id is already running under the same API key."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id: {request_id!r} is already running")
        self.request_id = request_id


class Overloaded(OutriderError):
    """Admission is full. Retry after `retry_after_s` seconds."""

    def __init__(self, problem: str, *, retry_after_s: float) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(OutriderError):
    """The request's own time limit passed before it finished."""


class RequestAborted(OutriderError):
    """The client aborted or left; nobody reads the rest."""


class EngineUnavailable(OutriderError):
    """The engine that ran the request is gone. Retryable: resume with the tokens received so far."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"engine unavailable: {cause}")
        self.cause = cause


class ConfigError(OutriderError):
    """A setting, or the product of several settings, cannot work."""


class CompatibilityError(OutriderError):
    """Draft and target (or a model and this engine) do not fit together."""


class ProtocolError(OutriderError):
    """The peer sent a message that the protocol does not allow."""


def _restored(kind: type[OutriderError], args: tuple[object, ...], fields: Mapping[str, object]) -> OutriderError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error
