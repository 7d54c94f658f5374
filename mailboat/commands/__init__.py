"""One module per command of `mailboat`; each holds a click command called `command` and imports what is heavy on use."""
