"""Addresses of the control plane."""

from __future__ import annotations

from django.urls import include, path

handler500 = "controlplane.api.problems.fault"

urlpatterns = [
    path("", include("controlplane.api.urls")),
    path("", include("controlplane.dashboard.urls")),
]
