"""Addresses of the pages. `login` and `logout` keep Django's own names; everything else lives in the namespace
`dashboard`.
"""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import include, path

from controlplane.dashboard.views import doors, fleet, islands, jobs, runs

project = "projects/<slug:project>/"
pages = [
    path("", doors.home, name="home"),
    path("favicon.svg", doors.favicon, name="favicon"),
    path(project, fleet.fleet, name="fleet"),
    path(project + "runs/", runs.runs, name="runs"),
    path(project + "runs/<slug:run>/", runs.run, name="run"),
    path(project + "runs/<slug:run>/versions/<int:number>/", runs.version, name="version"),
    path(project + "runs/<slug:run>/versions/<int:number>/replay/", runs.replay, name="replay"),
    path(project + "islands/register/", islands.register, name="register"),
    path(project + "islands/register/<int:enrolment>/", islands.enrolment, name="enrolment"),
    path(project + "islands/<uuid:island>/", islands.island, name="island"),
    path(project + "islands/<uuid:island>/verify/", islands.verify, name="verify"),
    path(project + "jobs/", jobs.jobs, name="jobs"),
    path(project + "jobs/<uuid:job>/", jobs.job, name="job"),
    path(project + "jobs/<uuid:job>/cancel/", jobs.cancel, name="cancel_job"),
]

urlpatterns = [
    path("login/", doors.Door.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("", include((pages, "dashboard"))),
]
