"""Webhook credentials in files are rotated while the evaluator runs."""

from kc_otel.client.signing import Secret, new_secret
from kc_otel.serve.webhooks.endpoints import Rotation


def test_a_secret_that_changes_in_its_file_is_read_again(tmp_path, caplog):
    """Within a few seconds; a file that is wrong or gone for a moment leaves the old secret in force."""
    path, first, two = tmp_path / "secret", new_secret(), new_secret()
    path.write_text(first)
    environ = {"KC_OTEL_WEBHOOK_PAGER_URL": "https://p.example", "KC_OTEL_WEBHOOK_PAGER_SECRET_FILE": str(path)}
    rotation = Rotation(["pager"], environ, 0.0)
    assert rotation.renewed(60.0) is None
    path.write_text(f"{two} {first}")
    assert rotation.renewed(61.0) is None
    assert rotation.renewed(70.0)["pager"].secrets == (Secret.parse(two), Secret.parse(first))
    assert rotation.renewed(80.0) is None
    path.write_text("rubbish")
    assert rotation.renewed(90.0) is None
    assert "the old webhook credentials stay in force" in caplog.text
    path.unlink()
    assert rotation.renewed(100.0) is None
    path.write_text(two)
    assert rotation.renewed(110.0)["pager"].secrets == (Secret.parse(two),)
