"""What ``--tee`` and ``--redirects`` mean, against torchrun's own reading of them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.api import Std, to_map

from resilient.protocol.shown_streams import BOTH, STDERR, STDOUT, ShownStreams

NUM_RANKS = 4
WORDS = st.sampled_from("0123") | st.dictionaries(
    st.integers(0, NUM_RANKS - 1), st.sampled_from("0123"), min_size=1
).map(lambda each: ",".join(f"{rank}:{streams}" for rank, streams in each.items()))


@given(tee=WORDS, redirects=WORDS)
def test_words_mean_what_torchrun_reads_in_them(tee: str, redirects: str) -> None:
    shown = ShownStreams(tee=tee, redirects=redirects)
    teed, redirected = (to_map(Std.from_str(words), NUM_RANKS) for words in (tee, redirects))
    for rank in range(NUM_RANKS):
        # torchrun shows what is teed, and what it does not redirect
        expected = [name for name in (Std.OUT, Std.ERR) if name in teed[rank] or name not in redirected[rank]]
        assert shown.of(rank) == sum({Std.OUT: STDOUT, Std.ERR: STDERR}[name] for name in expected)
        assert shown.logs(rank) == (Std.ERR in expected, Std.OUT in expected)
        assert shown.has_any or shown.of(rank) == 0


def test_by_default_all_goes_to_the_logs_alone() -> None:
    assert [ShownStreams().of(rank) for rank in range(2)] == [0, 0]


def test_filter_hides_others() -> None:
    shown = ShownStreams(tee="3", local_ranks="0,12")
    assert [rank for rank in range(20) if shown.of(rank) == BOTH] == [0, 12]
    assert sum(shown.of(rank) for rank in range(20)) == 2 * BOTH


def test_options_say_the_same_again() -> None:
    assert ShownStreams(tee="1").options == ("--tee", "1", "--redirects", "3")
    told = ("--tee", "0:1", "--redirects", "0", "--local-ranks-filter", "0,1")
    assert ShownStreams(tee="0:1", redirects="0", local_ranks="0,1").options == told


@pytest.mark.parametrize("words", ["4", "", "0:4", "0:1,", "a:1", "1,2", "-1:3"])
def test_other_words_are_refused(words: str) -> None:
    fix = "0 is for none, 1 for stdout, 2 for stderr, 3 for both"
    for name in ("tee", "redirects"):
        told = f"{name} must be 0, 1, 2, 3 or RANK:N,..., got {words!r}; {fix}"
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            ShownStreams(**{name: words})


def test_filter_is_checked() -> None:
    told = r"^local_ranks_filter must be local ranks with commas between, got '0:1'; as in 0,1$"
    with pytest.raises(ValueError, match=told):
        ShownStreams(local_ranks="0:1")
