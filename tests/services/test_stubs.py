from tests.stale_stubs import stale_stubs


def test_committed_stubs_are_what_the_protos_generate() -> None:
    assert stale_stubs() == []
