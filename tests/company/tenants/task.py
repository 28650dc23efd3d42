"""The base of all tasks of a project with tenants."""

from tenant_schemas_celery.task import TenantTask

from django_celery_safe import SafeTaskMixin


class SafeTenantTask(SafeTaskMixin, TenantTask):
    """A task of ours that runs in the schema of its tenant."""

    abstract = True
