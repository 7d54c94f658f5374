"""Background work: one row per job, which is the truth; messages only wake workers."""
