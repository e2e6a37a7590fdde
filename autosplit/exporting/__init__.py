"""A plan's stages as files for another runtime, which runs them without torch and without autosplit: one runtime a file."""
