"""Scheduling: which drafter acts in the next layer."""
