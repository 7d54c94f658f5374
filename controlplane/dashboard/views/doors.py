"""Sign-in, the way to the first project, and the favicon."""

from __future__ import annotations

from typing import cast

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.http import require_safe

from controlplane.accounts import selectors as accounts
from controlplane.accounts.login import LoginForm
from controlplane.dashboard.access import PageRequest, sign_in

MAX_ON_BADGE = 99


class Door(LoginView):
    """The sign-in page; somebody who is signed in already goes on."""

    template_name = "dashboard/login.html"
    redirect_authenticated_user = True
    extra_context = {"title": "Log in", "lost": 0}
    form_class = LoginForm

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """The page again; 429 with the time to wait after too many tries."""
        answer = super().form_invalid(form)
        if isinstance(form, LoginForm) and form.retry_after is not None:
            answer.status_code, answer["Retry-After"] = 429, str(form.retry_after)
        return answer


@require_safe
def home(request: HttpRequest) -> HttpResponseBase:
    """The reader's first project."""
    if not request.user.is_authenticated:
        return sign_in(cast(PageRequest, request))
    first = accounts.memberships(request.user).first()
    if first is None:
        return render(request, "dashboard/no_project.html", {"title": "No project", "lost": 0})
    return redirect("dashboard:fleet", first.project.slug)


@login_not_required
@require_safe
def favicon(request: HttpRequest) -> HttpResponse:
    """The mail boat, with the number of lost islands on it."""
    asked = request.GET.get("lost", "0")
    lost = min(int(asked), MAX_ON_BADGE) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 0
    answer = render(request, "components/favicon.svg", {"lost": lost}, content_type="image/svg+xml")
    answer["Cache-Control"] = "public, max-age=86400"
    return answer
