"""Read flags of the form PATTERN=DEVICE."""

from autosplit.errors import UsageError


def pins_of(texts: list[str] | None, flag: str = "--pin") -> dict[str, str]:
    """Pattern to device. Raises: UsageError: a pair without ``=``, or a pattern on two devices."""
    pins: dict[str, str] = {}
    for pattern, device in _pairs(texts, flag):
        if pins.setdefault(pattern, device) != device:
            raise UsageError(f"{flag} '{pattern}' is given with '{pins[pattern]}' and with '{device}'; ops run on one device")
    return pins


def device_lists(texts: list[str] | None, flag: str) -> dict[str, tuple[str, ...]]:
    """Pattern to all devices given with it. Raises: UsageError: a pair without ``=``."""
    found: dict[str, tuple[str, ...]] = {}
    for pattern, device in _pairs(texts, flag):
        found[pattern] = (*found.get(pattern, ()), device)
    return found


def _pairs(texts: list[str] | None, flag: str) -> list[tuple[str, str]]:
    for text in texts or []:
        if "=" not in text:
            raise UsageError(f"{flag} {text} has no '='; write {flag} 'PATTERN=DEVICE'")
    return [(text.rpartition("=")[0], text.rpartition("=")[2]) for text in texts or []]
