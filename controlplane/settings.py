"""Django settings. Every value that a deployment may change comes from `controlplane.env`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import structlog
from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from controlplane import env

try:
    BASE_DIR = env.CHECKOUT
    DEBUG = env.flag("MAILBOAT_DEBUG", False)
    MAILBOAT_READ_ONLY = env.flag("MAILBOAT_READ_ONLY", False)  # the dashboard's buttons are gone, with a banner
    SECRET_KEY = env.secret("MAILBOAT_SECRET_KEY") or env.kept_secret("django")
    MAILBOAT_HOME = env.home()
    MAILBOAT_PEPPERS = env.peppers()
    env.head_keys()  # read again for each signature (controlplane.head_keys); what can't be read stops the start
    MAILBOAT_BLOB_ROOT = env.blob_root()
    MAILBOAT_BLOB_URL = env.blob_url()
    MAILBOAT_CHECKPOINT_ROOTS = env.checkpoint_roots()
    MAILBOAT_PUBLIC_URL = env.text("MAILBOAT_PUBLIC_URL", "http://127.0.0.1:8000").rstrip("/")
    MAILBOAT_METRICS_TOKEN = env.secret("MAILBOAT_METRICS_TOKEN")
    MAILBOAT_LEASE_SECONDS = env.integer("MAILBOAT_LEASE_SECONDS", 30, low=1, high=3600)
    MAILBOAT_HEARTBEAT_SECONDS = env.integer("MAILBOAT_HEARTBEAT_SECONDS", 5, low=1, high=3600)
    MAILBOAT_DATABASE = env.database()
    PUBLIC_HOST = urlsplit(MAILBOAT_PUBLIC_URL).hostname or "localhost"
    ALLOWED_HOSTS = env.names("MAILBOAT_ALLOWED_HOSTS", f"localhost,127.0.0.1,[::1],{PUBLIC_HOST}")
except env.EnvironmentProblem as problem:
    raise ImproperlyConfigured(str(problem)) from problem

# Called as send(job id, kind) once the transaction that queued a job has committed. It only wakes a worker.
MAILBOAT_JOB_SENDER = "workers.app.send"
MAILBOAT_BROKER_CHECK = "workers.app.check_broker"
MAILBOAT_HEAD_DAYS = 7

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "csp",
    "django_htmx",
    "template_partials",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "controlplane.accounts",
    "controlplane.audit",
    "controlplane.registry",
    "controlplane.fleet",
    "controlplane.jobs",
    "controlplane.idempotency",
    "controlplane.api",
    "controlplane.dashboard",
    "controlplane.embedded",
]

MIDDLEWARE = [
    "controlplane.audit.middleware.request_id",
    "django.middleware.security.SecurityMiddleware",
    "controlplane.static_files.StaticFiles",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# A connection lives as long as its request (CONN_MAX_AGE 0) and there is no pool: under ASGI each request has a
# thread of its own, so kept connections would pile up per thread; a pool's worker threads do not survive the fork of
# a Celery child; and closing really gives the connection back before a long poll begins to wait. Over the Unix socket
# of the embedded database a new connection costs about a millisecond.
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": MAILBOAT_DATABASE.host,
        "PORT": MAILBOAT_DATABASE.port,
        "NAME": MAILBOAT_DATABASE.name,
        "USER": MAILBOAT_DATABASE.user,
        "PASSWORD": MAILBOAT_DATABASE.password,
        "CONN_MAX_AGE": 0,
        "OPTIONS": {"connect_timeout": 10, **dict(MAILBOAT_DATABASE.options)},
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

PASSWORD_HASHERS = ["django.contrib.auth.hashers.Argon2PasswordHasher"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
WHITENOISE_USE_FINDERS = True  # a checkout serves its files without a collect step

# Uploads of blobs never pass through Django's body handling (see api.uploads); this bounds everything else.
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024
HTTPS = MAILBOAT_PUBLIC_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 7 * 86400
SECURE_HSTS_SECONDS = 30 * 86400 if HTTPS else 0
CSRF_TRUSTED_ORIGINS = [MAILBOAT_PUBLIC_URL]
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "object-src": [NONE],
        "base-uri": [NONE],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    },
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.api.authentication.BearerAuthentication",
        "controlplane.api.authentication.PersonAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.api.permissions.RolePermission"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.api.parsers.BoundedJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "controlplane.api.schema.ProblemSchema",
    "EXCEPTION_HANDLER": "controlplane.api.problems.exception_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Mailboat",
    "DESCRIPTION": "Publish versions of model weights and follow them on islands.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "validatorUrl": None},
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.api.schema.add_plain_views",
    ],
    "ENUM_NAME_OVERRIDES": {
        "VersionState": "controlplane.registry.models.Version.State",
        "JobState": "controlplane.jobs.models.Job.State",
        "JobKind": "controlplane.jobs.models.Job.Kind",
        "IslandPhase": "controlplane.fleet.models.Island.Phase",
        "SyncOutcome": "controlplane.fleet.models.SyncReport.Outcome",
        "TokenRole": "controlplane.accounts.models.Token.Role",
        "MemberRole": "controlplane.accounts.models.Membership.Role",
        "TokenState": ["active", "expiring", "expired", "revoked"],
    },
}

_before_rendering: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "lines": {
            "()": structlog.stdlib.ProcessorFormatter,
            "foreign_pre_chain": _before_rendering,
            "processors": [
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.KeyValueRenderer(
                    key_order=["timestamp", "level", "event", "request_id"], drop_missing=True
                ),
            ],
        },
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "controlplane": {"level": "INFO"},
        "workers": {"level": "INFO"},
        "django.server": {"handlers": [], "level": "WARNING", "propagate": True},
    },
}
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        *_before_rendering,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)
