"""The page at "/": one HTML file without a build step, filled from server-sent events."""

from pathlib import Path

PAGE = Path(__file__).with_name("livepage.html").read_text(encoding="utf-8")
"""The page. It asks for the token, if the server wants one, and keeps it for the tab."""
