"""What `kc-otel status` and `watch` make of many events and routes: one line for what belongs together."""

from __future__ import annotations

from typing import Any

from kc_otel.cli.status_command import _event_line, _routes, _together


def event(id: int, kind: str, slice: str, at: float = 10.0, **data: Any) -> dict[str, Any]:
    said = {"clause": "tv", "slice": slice, "severity": "critical", "on": "fail", "actions": ["notify"]} | data
    return {"id": id, "contract": "policy", "kind": kind, "at": at, "data": said, "message": f"policy: {kind} {slice}"}


def test_alerts_of_one_moment_are_one_line_and_others_stand_alone() -> None:
    """Forty-five slices that fire together are said once; a person's word and another moment are not swallowed."""
    fired = [event(index, "firing", f"s{index}") for index in range(45)]
    later = event(50, "firing", "late", at=11.0)
    ended = [event(60, "resolved", "s0", at=12.0), event(61, "resolved", "s1", at=12.0)]
    word = {"id": 70, "contract": "policy", "kind": "acknowledged", "at": 10.0, "data": {"by": "ada"}, "message": "ada"}
    lines = [_event_line(one).plain[10:] for one in _together([*fired, word, later, *ended])]
    assert lines == [
        "policy: 45 alerts fire (critical): tv on s0, s1, s2 and 42 more",
        "policy: ada",
        "policy: firing late",
        "policy: 2 alerts no longer fire: tv on s0 and s1",
    ]


def test_many_routes_away_from_one_version_are_one_line() -> None:
    """With the command that lifts all of them; few have a line and a command each."""

    def said(many: int) -> list[str]:
        routes = [
            {"contract": "policy", "slice": f"s{index}", "avoid": "b", "kernel": "train-kernel", "reason": "bad"}
            for index in range(many)
        ]
        return [line.plain for line in _routes({"routes": routes}, None)]

    assert len(said(3)) == 3
    assert said(3)[0].startswith("route  policy/s0 avoids b, uses train-kernel: bad; lift it with kc-otel resume ")
    (line,) = said(46)
    assert line == (
        "route  policy: s0, s1, s2 and 43 more avoid b, use train-kernel; lift all of it with kc-otel resume policy "
        "--why ..., or one with --slice NAME"
    )
