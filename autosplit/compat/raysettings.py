"""Ray's own settings from the environment, which it reads once a process."""

from autosplit.compat.tried import needs


def reread_settings() -> None:
    """Let Ray read the environment again: the token that nodes ask for, and how they ask."""
    with needs("ray"):
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()
        Config.initialize("")
