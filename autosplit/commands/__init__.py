"""What the commands do: one function of an options value each."""
