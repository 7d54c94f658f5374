"""One module per subcommand of `mailboat`; each holds a click command called `command`, heavy imports come on use."""
