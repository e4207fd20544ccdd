"""Found only when train.py is started as a module of this package."""

SAID_BY_THE_PACKAGE = "here"
