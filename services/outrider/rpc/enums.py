"""Tables between domain enums and protobuf enums. Names match, so a table is made from its two types."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, Protocol, TypeVar

from outrider.core import dispatch, link, sequence, speculation
from outrider.core.errors import OutriderError, ProtocolError
from outrider.v1 import dispatch_pb2, generation_pb2, speculation_pb2

__all__ = [
    "CAPABILITIES",
    "FINISH_REASONS",
    "LINK_ERROR_CODES",
    "MODES",
    "PREFERENCES",
    "PROPOSAL_SOURCES",
    "REASONS",
    "REFUSAL_REASONS",
    "RULES",
    "SEQUENCE_ERROR_CODES",
    "EnumTable",
    "ProtoEnum",
    "Refusal",
    "protocol_error",
]

D = TypeVar("D", bound=Enum)
V = TypeVar("V", bound=int)

Refusal = Callable[[str, str], OutriderError]
"""Makes the error for (field, problem): `protocol_error` for a peer, `InvalidRequest` for a client."""


def protocol_error(field: str, problem: str) -> ProtocolError:
    """The error for a malformed field of a peer's message."""
    return ProtocolError(f"{field}: {problem}")


class ProtoEnum(Protocol[V]):
    """What a generated enum type offers."""

    def Name(self, number: V) -> str:
        """The name of a value."""
        ...

    def Value(self, name: str) -> V:
        """The value of a name."""
        ...

    def values(self) -> list[V]:
        """All values, UNSPECIFIED first."""
        ...


class EnumTable(Generic[D, V]):
    """Maps each member of a domain enum to the protobuf value `PREFIX_MEMBER`, and back.

    Raises `ValueError` at import when the protobuf enum lacks a member. The protobuf value 0
    (UNSPECIFIED) is refused unless `unspecified` says what it stands for.
    """

    def __init__(self, members: type[D], wrapper: ProtoEnum[V], unspecified: D | None = None) -> None:
        prefix = wrapper.Name(wrapper.values()[0]).removesuffix("UNSPECIFIED")
        self._to_proto = {member: wrapper.Value(prefix + member.name) for member in members}
        self._from_proto: dict[int, D] = {value: member for member, value in self._to_proto.items()}
        if unspecified is not None:
            self._from_proto[0] = unspecified

    def to_proto(self, member: D) -> V:
        """The protobuf value of a member."""
        return self._to_proto[member]

    def from_proto(self, value: int, field: str, refusal: Refusal = protocol_error) -> D:
        """The member of a protobuf value; raises what `refusal` makes when there is none."""
        member = self._from_proto.get(value)
        if member is None:
            raise refusal(field, "is not set" if value == 0 else f"{value} is not a known value")
        return member

    def known(self, values: Iterable[int]) -> frozenset[D]:
        """The members among the values. For sets of options: nobody uses one that it does not know."""
        return frozenset(self._from_proto[value] for value in values if value in self._from_proto)


PREFERENCES = EnumTable(
    speculation.SpeculationPreference,
    generation_pb2.SpeculationPreference,
    unspecified=speculation.SpeculationPreference.AUTO,
)
RULES = EnumTable(
    speculation.VerificationRule,
    generation_pb2.VerificationRule,
    unspecified=speculation.VerificationRule.COUPLED,
)
MODES = EnumTable(speculation.SpeculationMode, generation_pb2.SpeculationMode)
REASONS = EnumTable(speculation.SpeculationReason, generation_pb2.SpeculationReason)
FINISH_REASONS = EnumTable(sequence.FinishReason, generation_pb2.FinishReason)
SEQUENCE_ERROR_CODES = EnumTable(dispatch.SequenceErrorCode, dispatch_pb2.SequenceErrorCode)
CAPABILITIES = EnumTable(link.Capability, speculation_pb2.Capability)
REFUSAL_REASONS = EnumTable(link.RefusalReason, speculation_pb2.RefusalReason)
LINK_ERROR_CODES = EnumTable(link.LinkErrorCode, speculation_pb2.LinkErrorCode)
PROPOSAL_SOURCES = EnumTable(speculation.ProposalSource, speculation_pb2.ProposalSource)
