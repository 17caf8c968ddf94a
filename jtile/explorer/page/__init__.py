"""The page: a template, its style and its scripts, put together into one file."""
