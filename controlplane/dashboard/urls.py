"""Addresses of the pages. `login` and `logout` keep Django's own names; everything else lives in the namespace
`dashboard`.
"""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import include, path

from controlplane.dashboard.views import (
    actions,
    audit,
    bulk,
    doors,
    find,
    fleet,
    islands,
    jobs,
    keys,
    people,
    runs,
    steering,
    tokens,
)

project = "projects/<slug:project>/"
pages = [
    path("", doors.home, name="home"),
    path("favicon.svg", doors.favicon, name="favicon"),
    path(project, fleet.fleet, name="fleet"),
    path(project + "skew/", fleet.skew, name="skew"),
    path(project + "islands/bulk/", bulk.bulk, name="bulk"),
    path(project + "runs/", runs.runs, name="runs"),
    path(project + "runs/<slug:run>/", runs.run, name="run"),
    path(project + "runs/<slug:run>/versions/<int:number>/", runs.version, name="version"),
    path(project + "runs/<slug:run>/keys/register/", keys.register, name="register_key"),
    path(project + "runs/<slug:run>/keys/<uuid:key>/revoke/", keys.revoke, name="revoke_key"),
    path(project + "runs/<slug:run>/settings/", steering.settings, name="settings"),
    path(project + "runs/<slug:run>/collect/", steering.collect, name="collect"),
    path(project + "runs/<slug:run>/channels/new/", steering.new_channel, name="new_channel"),
    path(project + "runs/<slug:run>/channels/<slug:channel>/", steering.channel, name="channel"),
    path(project + "runs/<slug:run>/channels/<slug:channel>/protect/", steering.protect, name="protect"),
    path(project + "runs/<slug:run>/versions/<int:number>/tensors/", runs.tensors, name="tensors"),
    path(project + "runs/<slug:run>/versions/<int:number>/compare/", runs.compare, name="compare"),
    path(project + "runs/<slug:run>/versions/<int:number>/replay/", runs.replay, name="replay"),
    path(project + "islands/register/", islands.register, name="register"),
    path(project + "islands/register/<int:enrolment>/", islands.enrolment, name="enrolment"),
    path(project + "islands/<uuid:island>/", islands.island, name="island"),
    path(project + "islands/<uuid:island>/verify/", islands.verify, name="verify"),
    path(project + "islands/<uuid:island>/<slug:action>/", actions.act, name="act"),
    path(project + "find/", find.find, name="find"),
    path(project + "audit/", audit.audit, name="audit"),
    path(project + "audit/<slug:form>/", audit.export, name="audit_export"),
    path(project + "tokens/", tokens.tokens, name="tokens"),
    path(project + "tokens/new/", tokens.new, name="new_token"),
    path(project + "tokens/<int:token>/rotate/", tokens.rotate, name="rotate_token"),
    path(project + "tokens/<int:token>/revoke/", tokens.revoke, name="revoke_token"),
    path(project + "tokens/enrolment/<int:enrolment>/revoke/", tokens.revoke_enrolment, name="revoke_enrolment"),
    path(project + "people/", people.people, name="people"),
    path(project + "people/set/", people.set_role, name="set_role"),
    path(project + "people/<int:person>/remove/", people.remove, name="remove_member"),
    path(project + "jobs/", jobs.jobs, name="jobs"),
    path(project + "jobs/workers/", jobs.workers, name="workers"),
    path(project + "jobs/<uuid:job>/", jobs.job, name="job"),
    path(project + "jobs/<uuid:job>/cancel/", jobs.cancel, name="cancel_job"),
    path(project + "jobs/<uuid:job>/rerun/", jobs.rerun, name="rerun_job"),
]

urlpatterns = [
    path("login/", doors.Door.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("", include((pages, "dashboard"))),
]
