"""Slow tests run where their marker is asked for; what they measured is printed at the end."""


def _left_out(config):
    return "slow" not in config.getoption("markexpr")


def pytest_report_header(config):
    return "slow tests are left out: `make selftest` runs them (-m slow)" if _left_out(config) else None


def pytest_collection_modifyitems(config, items):
    if _left_out(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    told = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    if not told:
        return
    from cases.selftest.pages import PAGES

    for title, page in PAGES.items():
        if found := [row for name, rows in told if name == title for row in rows]:
            terminalreporter.section(title)
            terminalreporter.write_line(page(found))
