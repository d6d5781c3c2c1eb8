"""Processes that end with their test, as in tests/integration."""

from tests.integration.conftest import cluster, etcd, pytest_runtest_makereport

__all__ = ["cluster", "etcd", "pytest_runtest_makereport"]
