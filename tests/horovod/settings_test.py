"""When a call that a rank omits causes a warning, and when it ends the job."""

import pytest

rendezvous = pytest.importorskip("tfdist.distribution.horovod_rendezvous")


@pytest.mark.parametrize(
    ("check", "shutdown", "expected"),
    [
        ("", "", (60, 600)),
        ("5", "", (5, 600)),
        ("900", "", (900, 1800)),
        ("", "4", (2, 4)),
        ("", "0", (60, 0)),
        ("9", "8", (9, 8)),
    ],
)
def test_the_users_settings_stand_and_ours_keep_to_them(check, shutdown, expected):
    """0 means never; the user may set a shutdown before the check, for which Horovod logs a warning."""
    given = {rendezvous.CHECK: check, rendezvous.SHUTDOWN: shutdown}
    found = rendezvous.stall_settings({name: value for name, value in given.items() if value})
    assert (int(found[rendezvous.CHECK]), int(found[rendezvous.SHUTDOWN])) == expected


def test_where_calls_are_watched_by_ours_horovod_waits_longer():
    assert rendezvous.stall_settings({}, 3600) == {rendezvous.CHECK: "60", rendezvous.SHUTDOWN: "3600"}
