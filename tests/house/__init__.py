"""Tests imports, documents and packages."""
