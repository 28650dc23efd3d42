"""The site and a visitor, for all tests of this folder."""

from collections.abc import Iterator

import pytest
import requests

from tests.example.site import Site, Visitor, running_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site and its worker, without any server."""
    with running_site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def visitor(site: Site) -> Iterator[Visitor]:
    """Somebody who has not been there yet."""
    with requests.Session() as session:
        yield Visitor(site, session)
