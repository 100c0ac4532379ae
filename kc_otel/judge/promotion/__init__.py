"""Stages of a kernel version, the gates between them, and what people tell a promotion."""
