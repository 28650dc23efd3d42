"""Running a TestCase inside a test, as a project's own tests are run."""

import unittest


def run_testcase(case: type[unittest.TestCase]) -> None:
    """Run all tests of a TestCase; raise what the first one raised."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.wasSuccessful(), (result.errors + result.failures)[0][1]
    assert result.testsRun
