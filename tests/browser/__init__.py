"""
The example site in a browser: real Chromium, web server, prefork worker, Redis and mail server.

``SAFE_TEST_SCREENSHOTS=folder`` keeps the pictures; the docs show the upper part of three of them.
"""
