"""A package, because IPython 7 has one of this name on its path."""
