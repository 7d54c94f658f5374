"""The form of the login page, with its limits: guessing is slow, and nobody can lock another person out from elsewhere
for long.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.forms import AuthenticationForm
from django.core.exceptions import ValidationError

from controlplane.accounts import limits


class LoginForm(AuthenticationForm):
    """Name and password. `retry_after` is the number of seconds to wait when there were too many tries."""

    retry_after: int | None = None

    def clean(self) -> dict[str, Any]:
        """Counts the try before the password is looked at."""
        address = "" if self.request is None else self.request.META.get("REMOTE_ADDR", "")
        name = str(self.cleaned_data.get("username", "")).casefold()
        try:
            limits.take(limits.LOGIN_BY_ADDRESS, address)
            limits.take(limits.LOGIN_BY_NAME_AND_ADDRESS, f"{address} {name}")
            limits.take(limits.LOGIN_BY_NAME, name)
        except limits.TooMany as refusal:
            self.retry_after = refusal.seconds
            raise ValidationError(refusal.detail, code=refusal.code) from None
        return dict(super().clean())
