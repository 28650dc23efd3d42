"""
The example site in a browser: real Chromium, web server, prefork worker, Redis and mail server.

The pictures in the docs are ``admin-*-desktop-light.png`` of ``SAFE_TEST_SCREENSHOTS=folder``.
"""
