"""ServerLimits: limits of a server on bytes, seconds and connections."""

from dataclasses import dataclass, fields

from autosplit.errors import UsageError, raise_faults


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        body_bytes: largest body of a request.
        bodies_bytes: most bytes of all bodies that are held at a time.
        body_s: seconds in which a body must arrive.
        queue_s: seconds that a request waits for a place in its model's queue; then it is refused with status 429.
        request_s: seconds from the end of its body in which a request must be answered; then it fails with status 504.
        connections: most connections at a time.
        idle_s: seconds for which a connection may say nothing, before and between requests.
        drain_s: seconds in which requests may end after SIGTERM.
    Raises: UsageError: a limit is not above 0.
    """

    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30
    body_s: float = 30.0
    queue_s: float = 1.0
    request_s: float = 60.0
    connections: int = 1024
    idle_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        """Check that every limit is above 0."""
        wrong = [field.name for field in fields(self) if not 0 < getattr(self, field.name) < float("inf")]
        faults = [f"{name} is {getattr(self, name)}; it must be above 0" for name in wrong]
        raise_faults(UsageError, "the limits of the server are wrong", faults)
