"""Failures are told in one line as they happen: a session with GPUs may be stopped before the summary."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
        where = f"{crash.path.rpartition('/')[2]}:{crash.lineno}" if crash else report.when
        print(f"\nFAILED {report.nodeid.rpartition('/')[2]} ({where}): {said}", flush=True)
