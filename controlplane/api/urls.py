"""Addresses of the API. Uploads (`blobs/uploads/{id}`) are answered below Django, in `api.uploads`."""

from __future__ import annotations

from django.urls import include, path

from controlplane.api import (
    blob_view,
    fleet_views,
    head_view,
    health,
    job_views,
    keeping_views,
    key_views,
    metrics,
    people_urls,
    problems,
    route_views,
    schema_views,
    views,
)

RUN = "runs/<slug:run>"

project = [
    path("runs", views.Runs.as_view()),
    path(RUN, views.RunDetail.as_view()),
    path(f"{RUN}/epochs", views.Epochs.as_view()),
    path(f"{RUN}/blobs", views.Blobs.as_view()),
    path(f"{RUN}/blobs/uploads/<uuid:upload>/complete", views.CompleteUpload.as_view()),
    path(f"{RUN}/blobs/<slug:sha256>", blob_view.blob),
    path(f"{RUN}/versions", views.Versions.as_view()),
    path(f"{RUN}/versions/<int:number>", views.VersionDetail.as_view()),
    path(f"{RUN}/versions/<int:number>/anchor", views.VersionAnchor.as_view()),
    path(f"{RUN}/versions/<int:number>/manifest", views.Manifest.as_view()),
    path(f"{RUN}/versions/<int:number>/tensors", blob_view.statistics),
    path(f"{RUN}/channels", views.Channels.as_view()),
    path(f"{RUN}/channels/<slug:channel>", views.ChannelDetail.as_view()),
    path(f"{RUN}/channels/<slug:channel>/head", head_view.head),
    path(f"{RUN}/keys", key_views.Keys.as_view()),
    path(f"{RUN}/keys/<uuid:key>", key_views.KeyDetail.as_view()),
    path(f"{RUN}/trust", key_views.Trust.as_view()),
    path(f"{RUN}/plan", route_views.Plan.as_view()),
    path(f"{RUN}/leases", keeping_views.Leases.as_view()),
    path(f"{RUN}/leases/<int:lease>", keeping_views.LeaseDetail.as_view()),
    path(f"{RUN}/retention", keeping_views.RetentionPreview.as_view()),
    path(f"{RUN}/breaches", keeping_views.Breaches.as_view()),
    path("enrolment-tokens", fleet_views.EnrolmentTokens.as_view()),
    path("islands", fleet_views.Islands.as_view()),
    path("islands/enrol", fleet_views.Enrol.as_view()),
    path("islands/<uuid:island>", fleet_views.IslandDetail.as_view()),
    path("islands/<uuid:island>/heartbeat", fleet_views.Heartbeat.as_view()),
    path("islands/<uuid:island>/syncs", fleet_views.Syncs.as_view()),
    path("islands/<uuid:island>/challenges/<uuid:challenge>", fleet_views.Challenges.as_view()),
    path("fleet", fleet_views.Fleet.as_view()),
    path("fleet/resolve", keeping_views.Resolve.as_view()),
    path("jobs", job_views.Jobs.as_view()),
    path("jobs/<uuid:job>", job_views.JobDetail.as_view()),
    path("jobs/<uuid:job>/cancel", job_views.CancelJob.as_view()),
    *people_urls.project,
]

urlpatterns = [
    path("health/live", health.live, name="health-live"),
    path("health/ready", health.ready, name="health-ready"),
    path("metrics", metrics.metrics, name="metrics"),
    path("api/schema", schema_views.schema, name="api-schema"),
    path("api/docs/", schema_views.Docs.as_view(), name="api-docs"),
    path("api/v1/projects/<slug:project>/", include(project)),
    path("api/v1/", include(people_urls.person)),
    path("api/<path:rest>", problems.unknown_address),
]
