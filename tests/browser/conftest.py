"""One browser and one server for all tests of the chat page."""

from collections.abc import Iterator

import pytest

from quern.serve.routes import Welcome
from quern.serve.server import create_app
from tests.browser.chrome import Chrome, find_chrome
from tests.browser.parrot import Page, make_parrot
from tests.support.http_server import running


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if find_chrome() is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    chrome = Chrome(tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.close()


@pytest.fixture(scope="session")
def shared_page(browser: Chrome) -> Iterator[Page]:
    engine = make_parrot()
    app = create_app({"parrot": engine}, welcome=Welcome({"parrot": ["What is 2 + 3?", "Tell me a story."]}))
    with running(app) as url:
        yield Page(browser, url, engine)


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    """The page as at a first visit. Its console has no errors afterwards."""
    chrome = shared_page.chrome
    chrome.problems.clear()
    shared_page.engine.will_say("fine")
    shared_page.open()
    yield shared_page
    chrome.open("about:blank")
    problems, chrome.problems = chrome.problems, []
    assert problems == []
