"""The errors of the package: each is made of raw values, and comes whole out of a message."""

import copy
import pickle
from dataclasses import MISSING, fields
from typing import Any, Final

from django_celery_safe import exceptions
from django_celery_safe.exceptions import CelerySafeError

#: The errors that have values of their own.
ERRORS: Final[list[Any]] = [
    each
    for each in vars(exceptions).values()
    if isinstance(each, type) and issubclass(each, CelerySafeError) and "__init__" in vars(each)
]
#: A value of each type.
VALUES: Final[dict[str, Any]] = {"str": "x", "int": 2, "float": 1.5, "Any": None}


def test_errors_travel() -> None:
    """An error that was pickled or copied, or made by its args as Celery does, says the same."""
    assert ERRORS
    for kind in ERRORS:
        values = {each.name: VALUES[each.type.partition(" ")[0]] for each in fields(kind)}
        error = kind(**values)
        assert error.args == tuple(values.values())
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), kind(*error.args)):
            assert (type(again), again.args, vars(again)) == (kind, error.args, values)
            assert str(again) == str(error)
        needed = {each.name: values[each.name] for each in fields(kind) if each.default is MISSING}
        assert kind(**needed).args == kind(*needed.values()).args
