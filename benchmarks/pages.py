"""Pages whose sections are made by commands, one at a time."""

import re
from collections.abc import Sequence


def with_section(page: str, section: str) -> str:
    """The page with a section in place of the one with the same heading, or at the end if there is none.

    A section is a heading and the text until the next heading of any level.
    """
    parts = re.split(r"^(?=#{1,3} )", page, flags=re.MULTILINE)
    heading, new = section.partition("\n")[0], section.strip() + "\n"
    places = [number for number, part in enumerate(parts) if part.partition("\n")[0] == heading]
    if places:
        parts[places[0]] = new
    else:
        parts.append(new)
    return "\n".join(part.strip() + "\n" for part in parts if part.strip())


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))
