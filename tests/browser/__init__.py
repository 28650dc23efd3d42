"""
The example site in a browser: real Chromium, web server, prefork worker, Redis and mail server.

``conftest`` has the fixtures, ``pages`` what is watched on every page.
"""
