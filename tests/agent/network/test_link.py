"""What is told of a link over which nothing is heard."""

from __future__ import annotations

from resilient.agent.network.link import KnownLink

OWN, OTHER = "10.0.0.3", "10.0.0.1:29400"


def test_link_that_never_was_is_named() -> None:
    assert (
        KnownLink(5.0).told(60.0, OTHER, OWN, still_arrives=False)
        == f"the link {OWN} -> {OTHER}, over which nothing was heard yet"
    )


def test_silence_began_before_this_end_hung_up_and_is_the_way_from_there() -> None:
    link = KnownLink(4.0)
    link.break_off(OWN, OTHER, 100.0, is_silent=True)
    assert link.told(130.0, OTHER, "here", still_arrives=False) == (
        f"the link {OWN} -> {OTHER}: last heard 36 s ago, then nothing came any more: the way {OTHER} -> {OWN} is cut, "
        f"or both ways, or that machine is down"
    )


def test_silence_in_which_packets_come_is_one_of_the_other_end() -> None:
    link = KnownLink(4.0)
    link.break_off(OWN, OTHER, 100.0, is_silent=True)
    told = link.told(130.0, OTHER, "here", still_arrives=True)
    assert told.endswith(f"its packets come, but no answers to this node's: the way {OWN} -> {OTHER} is cut")


def test_end_that_hangs_up_hears_nothing_or_is_gone() -> None:
    link = KnownLink(4.0)
    link.break_off(OWN, OTHER, 100.0, is_silent=False)
    assert link.told(103.4, "10.0.0.2:1", "here", still_arrives=True) == (
        f"the link {OWN} -> {OTHER}, now looked for at 10.0.0.2:1: last heard 3 s ago, then it hung up, as it does "
        f"when it hears nothing: the way {OWN} -> {OTHER} is cut, or it has ended"
    )
