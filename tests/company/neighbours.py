"""
Who stands beside us: a class for each neighbour, which says how a project switches it on.

Only processes of the project load a neighbour, and they load one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

Function = Callable[..., Any]


class Neighbour:
    """Nobody: the base of all."""

    #: The distributions that have to be installed.
    packages: tuple[str, ...] = ()
    #: A requirement that is put before those, for another version.
    target: str | None = None
    #: Whether it is played at each landing, and not only each night.
    landing = False
    #: What stands before the command of each process, and their environment.
    launcher: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    #: More INSTALLED_APPS, and what makes their tables.
    apps: tuple[str, ...] = ()
    migrate: tuple[str, ...] = ("migrate",)
    #: More Django settings; changes of those of the database; its kind.
    settings: Mapping[str, Any] = {}
    database: Mapping[str, Any] = {}
    kind: Any = "postgres"
    #: The class of the project's Celery app, and options of it.
    app = "celery.Celery"
    app_options: Mapping[str, Any] = {}
    #: The base of all tasks; None: the app's.
    task_base: str | None = "django_celery_safe.SafeTask"
    #: The worker's pool.
    pool = "prefork"
    #: Commands of Celery that run beside the worker.
    beside: tuple[tuple[str, ...], ...] = ()
    #: Flows that are played only here.
    more: tuple[str, ...] = ()
    #: Flows whose messages are sent where the neighbour has nothing to give them, with Celery
    #: alone neither: by a relay, or by a worker after the run; a task of Django has no class.
    fresh: tuple[str, ...] = ()

    def __init__(self, **more: Any) -> None:
        self.__dict__.update(more)

    def switch_on(self) -> None:
        """Do what a project does in its settings."""

    def prepare(self) -> None:
        """Do what has to be done before the first flow."""

    def above(self, function: Function) -> Function:
        """Decorate a function that our decorators have decorated."""
        return function

    def below(self, function: Function) -> Function:
        """Decorate a function before ours do."""
        return function

    @contextmanager
    def request(self) -> Iterator[str | None]:
        """Be in a request; gives what its messages have to bring to their tasks."""
        yield None

    def brought(self) -> str | None:
        """Return, in a task, what came from the request."""
        return None


class Tracer(Neighbour):
    """Brings the id of a trace."""

    def span(self) -> Any:
        """Return the block of a request."""
        raise NotImplementedError

    @contextmanager
    def request(self) -> Iterator[str | None]:
        with self.span():
            yield self.brought()


class Sentry(Tracer):
    """sentry-sdk, which traces."""

    packages = ("sentry-sdk",)
    landing = True

    def switch_on(self) -> None:
        import sentry_sdk

        # Nobody listens there.
        sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", traces_sample_rate=1.0, shutdown_timeout=0)

    def span(self) -> Any:
        import sentry_sdk

        return sentry_sdk.start_transaction(name="request", op="http.server")

    def brought(self) -> str | None:
        import sentry_sdk

        span = sentry_sdk.get_current_span()
        return span and span.trace_id


class OpenTelemetry(Tracer):
    """OpenTelemetry's instrumentation of Celery."""

    packages = ("opentelemetry-instrumentation-celery", "opentelemetry-sdk")
    landing = True

    def switch_on(self) -> None:
        from opentelemetry import trace
        from opentelemetry.instrumentation.celery import CeleryInstrumentor
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
        CeleryInstrumentor().instrument()

    def span(self) -> Any:
        from opentelemetry import trace

        return trace.get_tracer("company").start_as_current_span("request")

    def brought(self) -> str | None:
        from opentelemetry import trace

        return format(trace.get_current_span().get_span_context().trace_id, "032x")


class DataDog(Tracer):
    """ddtrace with distributed tracing of Celery."""

    packages = ("ddtrace",)
    launcher = ("ddtrace-run",)
    env = {
        "DD_CELERY_DISTRIBUTED_TRACING": "true",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    }

    def span(self) -> Any:
        from ddtrace.trace import tracer

        return tracer.trace("request")

    def brought(self) -> str | None:
        from ddtrace.trace import tracer

        span = tracer.current_span()
        return span and str(span.trace_id)


class NewRelic(Tracer):
    """New Relic's agent, in the mode that sends nothing."""

    packages = ("newrelic",)
    landing = True
    launcher = ("newrelic-admin", "run-program")
    env = {
        "NEW_RELIC_DEVELOPER_MODE": "true",
        "NEW_RELIC_LICENSE_KEY": "0" * 40,
        "NEW_RELIC_LOG": "stderr",
        "NEW_RELIC_LOG_LEVEL": "error",
    }
    fresh = ("killed", "chain")

    def span(self) -> Any:
        from newrelic import agent

        return agent.BackgroundTask(agent.register_application(timeout=30), "request")

    def brought(self) -> str | None:
        from newrelic import agent

        trace: str | None = agent.current_trace_id()
        return trace


#: The user for whom the project acts.
acting_user: ContextVar[str | None] = ContextVar("acting", default=None)


@contextmanager
def acting(user: str | None) -> Iterator[str | None]:
    """Act for a user, as the middleware of a project does."""
    token = acting_user.set(user)
    try:
        yield user
    finally:
        acting_user.reset(token)


class OwnHeaders(Neighbour):
    """A project whose task class sends the acting user."""

    landing = True
    task_base = "tests.company.bases.HeaderTask"
    fresh = ("chain", "django.tasks")

    def request(self) -> Any:
        return acting("ann")

    def brought(self) -> str | None:
        return acting_user.get()


def inject(function: Function) -> Function:
    """Give a function its first argument."""

    @wraps(function)
    def injected(*args: Any, **kwargs: Any) -> Any:
        return function("service", *args, **kwargs)

    return injected


def wanting(function: Function) -> Function:
    """Return a function with a service before its own argument."""

    def wants(service: str, flow: Any) -> Any:
        assert service == "service"
        return function(flow)

    wants.__name__, wants.__module__ = function.__name__, function.__module__
    return wants


BEAT: dict[str, Any] = {
    "settings": {
        "CELERY_BEAT_SCHEDULE": {
            "tick": {"task": "tests.company.tasks.carried", "schedule": 3.0, "args": ("beat",)}
        },
        "CELERY_BEAT_MAX_LOOP_INTERVAL": 1,
    },
    "more": ("beat",),
}
DATABASE_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
EVENTS = {"CELERY_WORKER_SEND_TASK_EVENTS": True, "CELERY_TASK_SEND_SENT_EVENT": True}
RESULTS = {"CELERY_RESULT_BACKEND": "django-db", "CELERY_RESULT_EXTENDED": True}


class DebugToolbar(Neighbour):
    """django-debug-toolbar around the requests that send."""

    packages = ("django-debug-toolbar",)
    apps = ("django.contrib.staticfiles", "debug_toolbar")
    settings = {
        "STATIC_URL": "static/",
        "TEMPLATES": [
            {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}
        ],
    }

    @contextmanager
    def request(self) -> Iterator[str | None]:
        from debug_toolbar.toolbar import DebugToolbar as Toolbar
        from django.http import HttpResponse
        from django.test import RequestFactory

        panels = Toolbar(RequestFactory().get("/"), lambda request: HttpResponse()).panels
        for panel in panels:
            panel.enable_instrumentation()
        try:
            yield None
        finally:
            for panel in reversed(panels):
                panel.disable_instrumentation()


class Tenants(Neighbour):
    """tenant-schemas-celery on django-tenants, with our tables in the shared schema."""

    app = "tenant_schemas_celery.app.CeleryApp"
    task_base = "tests.company.tenants.task.SafeTenantTask"
    packages = ("tenant-schemas-celery", "django-tenants")
    apps = ("django_tenants", "tests.company.tenants")
    migrate = ("migrate_schemas", "--shared", "--run-syncdb")
    database = {"ENGINE": "django_tenants.postgresql_backend"}
    settings = {
        "SHARED_APPS": ["django_tenants", "tests.company.tenants", "django_celery_safe"],
        "TENANT_APPS": ["django.contrib.contenttypes"],
        "TENANT_MODEL": "tenants.Tenant",
        "TENANT_DOMAIN_MODEL": "tenants.Domain",
        "DATABASE_ROUTERS": ["django_tenants.routers.TenantSyncRouter"],
    }

    def prepare(self) -> None:
        from tests.company.tenants.models import Tenant

        Tenant(schema_name="acme").save()

    @contextmanager
    def request(self) -> Iterator[str | None]:
        from django_tenants.utils import schema_context

        with schema_context("acme"):
            yield "acme"

    def brought(self) -> str | None:
        from django.db import connection

        schema: str = connection.schema_name
        return schema


NEIGHBOURS: dict[str, Neighbour] = {
    "nobody": Neighbour(),
    "sentry-sdk": Sentry(),
    "sentry-sdk, oldest": Sentry(target="sentry-sdk==2.20.0", landing=False),
    "OpenTelemetry": OpenTelemetry(),
    "ddtrace": DataDog(),
    "newrelic": NewRelic(),
    "custom headers": OwnHeaders(),
    "a task class of your own": OwnHeaders(
        task_base="tests.company.bases.UserTask", more=("class raises",)
    ),
    "a task class with atomic()": Neighbour(
        landing=True, task_base="tests.company.bases.AtomicTask"
    ),
    "a decorator that injects, below ours": Neighbour(
        landing=True, below=lambda function: inject(wanting(function))
    ),
    "a decorator that injects, above ours": Neighbour(landing=True, above=inject, below=wanting),
    "task_cls, with pickle": Neighbour(
        landing=True,
        app_options={"task_cls": "django_celery_safe:SafeTask"},
        task_base=None,
        settings={"CELERY_ACCEPT_CONTENT": ["json", "pickle"]},
        env={"C_FORCE_ROOT": "true"},
        more=("pickle",),
    ),
    # The kill ends the worker whole.
    "gevent": Neighbour(packages=("gevent",), landing=True, pool="gevent"),
    "PgBouncer": Neighbour(landing=True, kind="pgbouncer"),
    "django-celery-results": Neighbour(
        packages=("django-celery-results",), apps=("django_celery_results",), settings=RESULTS
    ),
    # Its connection to PostgreSQL idles from tick to tick.
    "django-celery-beat": Neighbour(
        packages=("django-celery-beat",),
        apps=("django_celery_beat",),
        beside=(("beat", "--scheduler", DATABASE_SCHEDULER),),
        **BEAT,
    ),
    "celery-redbeat": Neighbour(
        packages=("celery-redbeat",),
        beside=(("beat", "--scheduler", "redbeat.RedBeatScheduler"),),
        **BEAT,
    ),
    "flower": Neighbour(
        packages=("flower",),
        settings=EVENTS,
        env={"FLOWER_UNAUTHENTICATED_API": "true"},
        beside=(("flower", "--address=127.0.0.1", "--port={port}"),),
        more=("flower",),
    ),
    "django-debug-toolbar": DebugToolbar(),
    "tenant-schemas-celery": Tenants(),
}
