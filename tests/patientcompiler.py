"""The process that compiles, in tests: it outlives files that need no compiler, because a new one loads exporters for 4 s."""

from multiprocessing.connection import Connection

from autosplit.backends import apart


def main(connection: Connection) -> None:
    apart.IDLE_S *= 10
    apart.main(connection)
