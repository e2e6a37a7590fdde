"""Every number of the planner says what it is, and what it stands on."""

from benchmarks.constants import constants, kinds, rows


def test_every_number_has_a_docstring_and_a_row_with_its_value_and_what_it_stands_on() -> None:
    """There were about 190 numbers, of which a fifth said nothing. `python -m benchmarks.constants --rest` writes the table."""
    numbers, table = constants(), rows()
    assert [name for name, number in numbers.items() if not number.words] == []
    assert {name: number.value for name, number in numbers.items()} == {name: value for name, (value, _) in table.items()}
    assert [name for name, (_, stands_on) in table.items() if not stands_on] == []
    assert sorted(kinds().keys() - numbers) == []
