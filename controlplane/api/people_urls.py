"""Addresses about people, keys, orders, workers and the audit log."""

from __future__ import annotations

from django.urls import path

from controlplane.api import audit_views, fleet_views, order_views, people_views, work_views

ISLAND = "islands/<uuid:island>"

project = [
    path("caller", people_views.Caller.as_view()),
    path("members", people_views.Members.as_view()),
    path("members/<int:user>", people_views.MemberDetail.as_view()),
    path("tokens", people_views.Tokens.as_view()),
    path("tokens/<int:token>", people_views.TokenDetail.as_view()),
    path("tokens/<int:token>/rotate", people_views.RotateToken.as_view()),
    path("tokens/<int:token>/revoke", people_views.RevokeToken.as_view()),
    path("enrolment-tokens/<int:token>/revoke", fleet_views.RevokeEnrolmentToken.as_view()),
    path(f"{ISLAND}/approve", order_views.Approve.as_view()),
    path(f"{ISLAND}/drain", order_views.Drain.as_view()),
    path(f"{ISLAND}/stop-drain", order_views.StopDrain.as_view()),
    path(f"{ISLAND}/enable", order_views.Enable.as_view()),
    path(f"{ISLAND}/disable", order_views.Disable.as_view()),
    path(f"{ISLAND}/pin", order_views.Pin.as_view()),
    path(f"{ISLAND}/unpin", order_views.Unpin.as_view()),
    path(f"{ISLAND}/rotate", order_views.Rotate.as_view()),
    path(f"{ISLAND}/revoke", order_views.Revoke.as_view()),
    path(f"{ISLAND}/verify", order_views.Verify.as_view()),
    path("jobs/<uuid:job>/events", work_views.JobEvents.as_view()),
    path("jobs/<uuid:job>/rerun", work_views.RerunJob.as_view()),
    path("queues", work_views.Queues.as_view()),
    path("workers", work_views.Workers.as_view()),
    path("schedule", work_views.Schedule.as_view()),
    path("audit", audit_views.Audit.as_view()),
    path("audit/export", audit_views.AuditExport.as_view()),
]

person = [
    path("sessions", people_views.Sessions.as_view()),
    path("sessions/<int:session>", people_views.SessionDetail.as_view()),
]
