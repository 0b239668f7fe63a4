"""Executes a Plan: devices, the loader, the ops at a unit's boundaries, timing."""
