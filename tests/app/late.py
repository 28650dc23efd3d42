"""A task of Django in a module that no worker imports when it starts, of an installed app."""

from django.tasks import task


@task
def multiply(x: int, y: int) -> int:
    """Return the product."""
    return x * y


#: Something at a path that is no task.
PLAIN = "plain"
