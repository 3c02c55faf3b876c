"""Text leaves as it is whole: no half characters, no half stop strings, nothing behind a stop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.text import TextStream

BYTES = [bytes([i]) for i in range(256)]  # tokens 0 to 255: one byte each


def decoder(pieces: Sequence[bytes]):
    """Byte-level decoding: bytes joined, then read as UTF-8; what is no character becomes U+FFFD."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def stream_of(pieces: Sequence[bytes], stop: Sequence[str] = (), include_stop: bool = False) -> TextStream:
    return TextStream(decoder(pieces), stop, include_stop)


def play(stream: TextStream, tokens: Sequence[int], block: Sequence[int] = ()) -> tuple[list[str], int]:
    """Push tokens until a stop; `take` after each block. Returns the pieces and how many tokens were used."""
    shown: list[str] = []
    ends = set(block) or set(range(1, len(tokens) + 1))
    used = 0
    for i, token in enumerate(tokens, 1):
        used = i
        stopped = stream.push(token)
        if stopped or i in ends:
            shown.append(stream.take())
        if stopped:
            break
    stream.finish()
    shown.append(stream.take())
    return shown, used


# ------------------------------------------------------------------ characters
def test_an_emoji_shows_when_its_last_byte_is_there():
    stream = stream_of(BYTES)
    shown = []
    for byte in "a🙂b".encode():
        assert stream.push(byte) is False
        shown.append(stream.take())
    assert shown == ["a", "", "", "", "🙂", "b"]


def test_a_joined_emoji_split_over_uneven_tokens():
    text = "x👩‍👩‍👧‍👦é中"
    raw = text.encode()
    pieces = [raw[i : i + 3] for i in range(0, len(raw), 3)]
    shown, _ = play(stream_of(pieces), range(len(pieces)))
    assert "".join(shown) == text
    assert not any("�" in s for s in shown)


def test_an_unfinished_character_shows_at_the_end_as_it_is():
    stream = stream_of(BYTES)
    for byte in b"ok\xf0\x9f":
        stream.push(byte)
    assert stream.take() == "ok"
    stream.finish()
    assert stream.take() == "�"
    assert stream.text == "ok�"


def test_a_byte_that_never_becomes_a_character_does_not_block_the_text():
    shown, _ = play(stream_of(BYTES), b"a\xe2\x82b\xffc")
    assert "".join(shown) == b"a\xe2\x82b\xffc".decode(errors="replace")


def test_a_token_without_text_is_nothing_new():
    stream = stream_of([b"a", b"", b"b"])
    assert [stream.push(t) or stream.take() for t in (0, 1, 1, 2)] == ["a", "", "", "b"]


def test_context_decides_how_a_token_reads():
    """Sentencepiece drops the space of the first word only: pieces are read behind what stood before."""
    words = ["▁Hello", "▁big", "▁world"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" "))
    shown, _ = play(stream, [0, 1, 2])
    assert "".join(shown) == "Hello big world"


# ------------------------------------------------------------------ stop strings
def test_a_stop_inside_one_token():
    shown, used = play(stream_of([b"one END two"], ["END"]), [0])
    assert (shown[0], used) == ("one ", 1)


def test_a_stop_over_several_tokens_leaks_nothing():
    stream = stream_of([b"hello ", b"ST", b"O", b"P!", b"more"], ["STOP"])
    shown, used = play(stream, range(5))
    assert shown == ["hello ", "", "", "", ""]
    assert (used, stream.text, stream.stopped_by) == (4, "hello ", "STOP")


def test_what_only_looked_like_a_stop_is_shown():
    stream = stream_of([b"S", b"T", b"A", b"R"], ["STOP"])
    shown, _ = play(stream, range(4))
    assert shown == ["", "", "STA", "R", ""]


def test_a_stop_that_begins_again_inside_itself():
    shown, _ = play(stream_of(BYTES, ["aab"]), b"xaaabz")
    assert "".join(shown) == "xa"


def test_the_stop_that_completes_first_wins():
    stream = stream_of([b"say hello world"], ["world", "lo", "hello"])
    play(stream, [0])
    assert (stream.text, stream.stopped_by) == ("say ", "hello")
    stream = stream_of(BYTES, ["lo w", "hello"])
    play(stream, b"say hello world")
    assert (stream.text, stream.stopped_by) == ("say ", "hello")


def test_the_stop_can_be_included():
    stream = stream_of([b"one E", b"ND two"], ["END"], include_stop=True)
    shown, _ = play(stream, range(2))
    assert "".join(shown) == stream.text == "one END"


def test_no_stop_before_it_is_allowed():
    """min_tokens: a stop string that is complete too early is plain text, and is not found later."""
    stream = stream_of([b"END", b" x", b"EN", b"D", b"y"], ["END"])
    assert [stream.push(t, may_stop=t > 1) for t in range(4)] == [False, False, False, True]
    assert stream.text == "END x"


def test_a_stop_with_a_character_split_over_tokens():
    shown, used = play(stream_of(BYTES, ["🙂!"]), "a🙂!b".encode())
    assert "".join(shown) == "a"
    assert used == 6


def test_the_end_shows_what_was_held_back():
    stream = stream_of(BYTES, ["STOP"])
    for byte in b"ab ST":
        stream.push(byte)
    assert stream.take() == "ab "
    stream.finish()
    assert stream.take() == "ST"


def test_a_stop_before_an_unfinished_character_is_seen_at_once():
    """A token may hold a stop and half of the next character: the text must not wait for the other half."""
    stream = stream_of([b"one ", b"END\xf0\x9f", b"\x99\x82"], ["END"])
    assert [stream.push(0), stream.push(1)] == [False, True]
    assert (stream.text, stream.stopped_by) == ("one ", "END")


def test_a_part_of_any_stop_is_held_back():
    shown, _ = play(stream_of(BYTES, ["xyz", "END", "STOP"]), b"a ENDURES")
    assert "".join(shown) == "a "
    shown, _ = play(stream_of(BYTES, ["xyz", "END", "STOP"]), b"a ST EN")
    assert shown == ["a", " ", "", "", "ST ", "", "", "EN"]


@pytest.mark.parametrize("stop", ["END", "D"])
def test_a_character_behind_a_stop_that_came_too_early_is_whole(stop: str):
    """min_tokens let the stop pass; half a character behind it must still wait for its other half."""
    stream = stream_of([b"END", b"\xf0\x9f", b"\x99\x82", b"x"], [stop])
    assert [stream.push(t, may_stop=t > 0) for t in range(4)] == [False] * 4
    stream.finish()
    assert stream.take() == stream.text == "END🙂x"


texts = st.text(alphabet="ab é🙂", max_size=24)
cut_lists = st.lists(st.integers(0, 100), max_size=60)


@st.composite
def stops(draw: st.DrawFn, text: str) -> list[str]:
    """A few stop strings: parts of the text, or parts of it with another end."""
    out = []
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        part = text[at : at + draw(st.integers(1, 4))] + draw(st.sampled_from(["", "", "a", "🙂"]))
        out.append(part or "ab")
    return out


def split(raw: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(raw), *(c % (len(raw) + 1) for c in cuts)})
    return [raw[a:b] for a, b in itertools.pairwise(marks)]


@settings(max_examples=300)
@given(text=texts, cuts=cut_lists, block=st.sets(st.integers(1, 30)), data=st.data())
def test_streamed_pieces_are_the_text_up_to_the_first_stop(
    text: str, cuts: list[int], block: set[int], data: st.DataObject
):
    stop = data.draw(stops(text))
    pieces = split(text.encode(), cuts)
    stream = stream_of(pieces, stop)
    shown, _ = play(stream, range(len(pieces)), sorted(block))
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(found)[1]] if found else text
    assert "".join(shown) == stream.text == expected
    assert (stream.stopped_by is not None) == bool(found)


@given(text=texts, cuts=cut_lists, data=st.data())
def test_an_included_stop_ends_the_text(text: str, cuts: list[int], data: st.DataObject):
    stop = data.draw(stops(text))
    pieces = split(text.encode(), cuts)
    stream = stream_of(pieces, stop, include_stop=True)
    shown, _ = play(stream, range(len(pieces)))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert "".join(shown) == stream.text == text[: min(ends, default=len(text))]


@given(text=texts, cuts=cut_lists, data=st.data())
def test_at_no_time_more_is_shown_than_is_safe(text: str, cuts: list[int], data: st.DataObject):
    """Whatever comes next, what was shown never has to be taken back."""
    stop = data.draw(stops(text))
    pieces = split(text.encode(), cuts)
    stream, shown = stream_of(pieces, stop), ""
    for i in range(len(pieces)):
        stopped = stream.push(i)
        shown += stream.take()
        assert not any(s in shown for s in stop)
        if stopped:
            assert shown == stream.text
            break
        for s in stop:  # suppose that this stop string comes next
            future = (shown + stream.text[len(shown) :]) + s
            cut = min((future.find(x) + len(x), future.find(x)) for x in stop if x in future)[1]
            assert len(shown) <= cut


@given(raw=st.binary(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=30))
def test_any_bytes_come_out_as_one_reading_of_all_of_them(raw: bytes, cuts: list[int]):
    pieces = split(raw, cuts)
    stream = stream_of(pieces)
    shown, _ = play(stream, range(len(pieces)))
    assert "".join(shown) == stream.text == raw.decode(errors="replace")


@given(raw=st.binary(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=30), known=st.integers(0, 5))
def test_all_at_once_is_the_same_text(raw: bytes, cuts: list[int], known: int):
    pieces = split(raw, cuts)
    known = min(known, len(pieces))
    texts = []
    for way in ("push", "extend"):
        stream = TextStream(decoder(pieces), before=range(known))
        if way == "push":
            for i in range(known, len(pieces)):
                stream.push(i)
        else:
            stream.extend(range(known, len(pieces)))
        stream.finish()
        texts.append(stream.take())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_an_empty_stream(stop: list[str]):
    stream = stream_of(BYTES, stop)
    assert stream.take() == ""
    stream.finish()
    assert (stream.take(), stream.text) == ("", "")
