"""Repeated requests: the answer to a create under an `Idempotency-Key` is kept and given again."""
