"""What operators set on a run: where its channels point, and its settings. Both forms carry the revision that they
were filled in from; when somebody else was quicker, nothing is overwritten.
"""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.forms import ChannelForm, MoveForm, SettingsForm
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import runs as rows
from controlplane.jobs import triggers
from controlplane.registry import retention, steering
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Changed, Refusal

CHANGED = "Somebody changed it meanwhile; nothing was overwritten. This is how it is now."


@require_http_methods(["GET", "HEAD", "POST"])
@member
@operator
def channel(request: PageRequest, run: str, channel: str) -> HttpResponse:
    """Promote a version, or roll back to one: the second asks for a reason and the channel's name."""
    found = registry.run(request.seat.project, run)
    row = registry.channel(found, channel)
    posted = request.POST if request.method == "POST" else None
    form = MoveForm(row, posted, initial={"version": request.GET.get("version", ""), "seen": row.revision})
    if posted is not None and form.is_valid():
        try:
            form.move(actor=request.user.get_username())
        except Changed:
            messages.error(request, CHANGED)
            return redirect("dashboard:channel", request.seat.project.slug, run, channel)
        except Refusal as refusal:
            form.add_error(None, refusal.detail)
        else:
            messages.success(request, f"{channel} points at version {form.cleaned_data['version']}.")
            return redirect("dashboard:run", request.seat.project.slug, run)
    target = rows.version_or_none(found, form.target) if form.target is not None else None
    context = {
        "run": found,
        "channel": row,
        "form": form,
        "target": target,
        "backwards": form.backwards,
        "followers": row.islands.count(),
        "route": rows.route(found, row.version.state_digest, target.number) if target and row.version else None,
    }
    return page(request, "dashboard/channel.html", context, title=f"Move {channel}", tab="runs", live=False)


@require_POST
@member
@operator
def protect(request: PageRequest, run: str, channel: str) -> HttpResponse:
    """Protect a channel from moving by itself, or let it go again."""
    row = registry.channel(registry.run(request.seat.project, run), channel)
    wanted = request.POST.get("protected") == "yes"
    steering.edit_channel(row, version=None, protected=wanted, reason="", seen=None, actor=request.user.get_username())
    said = "moves by an operator's hand alone" if wanted else "follows its run again"
    messages.success(request, f"{channel} {said}.")
    return redirect("dashboard:run", request.seat.project.slug, run)


@require_http_methods(["GET", "HEAD", "POST"])
@member
@operator
def new_channel(request: PageRequest, run: str) -> HttpResponse:
    """A further name that islands can follow."""
    found = registry.run(request.seat.project, run)
    form = ChannelForm(found, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            form.create(actor=request.user.get_username())
        except Changed:
            form.add_error("name", "There is such a channel already.")
        except Refusal as refusal:
            form.add_error(None, refusal.detail)
        else:
            messages.success(request, f"The channel {form.cleaned_data['name']} is there.")
            return redirect("dashboard:run", request.seat.project.slug, run)
    context = {"run": found, "form": form}
    return page(request, "dashboard/new_channel.html", context, title="New channel", tab="runs", live=False)


@require_http_methods(["GET", "HEAD", "POST"])
@member
@operator
def settings(request: PageRequest, run: str) -> HttpResponse:
    """What the run keeps and allows."""
    found = registry.run(request.seat.project, run)
    form = SettingsForm(found, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        if "preview" not in request.POST:
            return _saved(request, form, run)
        found.keep_versions, found.keep_days = form.cleaned_data["keep_versions"], form.cleaned_data["keep_days"]
    context = {"run": found, "form": form, "shown": retention.preview(found), "previewed": "preview" in request.POST}
    return page(request, "dashboard/settings.html", context, title=f"Settings of {run}", tab="runs", live=False)


def _saved(request: PageRequest, form: SettingsForm, run: str) -> HttpResponse:
    try:
        form.save(actor=request.user.get_username())
    except Changed:
        messages.error(request, CHANGED)
        return redirect("dashboard:settings", request.seat.project.slug, run)
    messages.success(request, f"The settings of {run} are saved.")
    return redirect("dashboard:run", request.seat.project.slug, run)


@require_POST
@member
@operator
def collect(request: PageRequest, run: str) -> HttpResponse:
    """Remove what the run no longer keeps, now."""
    job, _ = triggers.collect(registry.run(request.seat.project, run), actor=request.user.get_username())
    return redirect("dashboard:job", request.seat.project.slug, job.pk)
