"""Pages of benchmarks are remade section by section, and the rest of a page stays."""

from benchmarks.pages import with_section

PAGE = "# Hosts\n\nAbout.\n\n## Link\n\nold\n\n### Small\n\nkept\n\n## End\n\nkept too\n"


def test_a_section_takes_the_place_of_the_one_with_its_heading() -> None:
    """Text under deeper headings and after the next heading is another section."""
    assert with_section(PAGE, "## Link\n\nnew") == PAGE.replace("old", "new")
    assert with_section(PAGE, "# Hosts\n\nAnew.\n") == PAGE.replace("About", "Anew")


def test_a_new_section_goes_to_the_end() -> None:
    """A page that has no such heading grows."""
    assert with_section(PAGE, "## More\n\nnew") == PAGE + "\n## More\n\nnew\n"
