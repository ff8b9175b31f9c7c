"""Tests mirror the source folders; tests/field/ holds the field-report cases by number."""
