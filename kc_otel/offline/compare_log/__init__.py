"""One recording in every tool's terms and in ours."""
