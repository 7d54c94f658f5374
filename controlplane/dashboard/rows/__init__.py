"""Reads that only pages need, shaped as rows of what a page shows.

The number of queries must never grow with the number of rows. What API and pages both read stands in the selectors of
the applications.
"""
