"""A plan's stages as files for another runtime, which runs them without autosplit: one runtime a file. And stages read back."""
