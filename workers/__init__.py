"""Background work: Celery tasks that load rows, call the library and record the outcome."""
