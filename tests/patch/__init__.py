"""Tests of the patch file."""
