"""What is written is what other implementations read, and the other way round."""

from __future__ import annotations

import hpack
import hyperframe.frame as theirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.serve.receivers.http2_frames import (
    ConnectionFaultError,
    ErrorCode,
    Setting,
    data_frames,
    frame,
    goaway,
    header_fragment,
    number_of,
    read_head,
    read_settings,
    rst_stream,
    settings,
    window_update,
)
from kc_otel.serve.receivers.http2_headers import (
    HeaderReader,
    MalformedError,
    check_trailers,
    length_of,
    literal,
    request_of,
    status,
)

NUMBERS = st.integers(1, 2**31 - 1)


def parsed(sent: bytes) -> theirs.Frame:
    found, length = theirs.Frame.parse_frame_header(memoryview(sent[:9]))
    assert length == len(sent) - 9
    found.parse_body(memoryview(sent[9:]))
    return found


@given(NUMBERS, st.binary(max_size=70_000))
def test_content_is_in_frames_that_every_client_takes(number, content):
    """None is longer than 16 KiB, and together they are the content."""
    sent, found = data_frames(number, content), []
    while sent:
        length = int.from_bytes(sent[:3], "big")
        found.append(parsed(sent[: 9 + length]))
        sent = sent[9 + length :]
    assert all(one.stream_id == number and 0 < len(one.data) <= 16_384 for one in found)
    assert b"".join(one.data for one in found) == content


@given(NUMBERS, st.sampled_from(ErrorCode), st.text(max_size=20))
def test_frames_that_say_a_number_say_it_to_others(number, code, why):
    """Windows, resets and goodbyes, as hyperframe reads them."""
    assert parsed(window_update(3, number)).window_increment == number
    assert parsed(rst_stream(number, code)).error_code == code
    found = parsed(goaway(number, code, why))
    assert (found.last_stream_id, found.error_code, found.additional_data.decode()) == (number, code, why)


@given(st.dictionaries(st.sampled_from([Setting.HEADER_TABLE_SIZE, Setting.MAX_HEADER_LIST_SIZE]), NUMBERS))
def test_settings_are_read_as_they_are_written(said):
    """By us and by others."""
    sent = settings(said)
    assert parsed(sent).settings == {int(name): value for name, value in said.items()}
    assert read_settings(memoryview(sent)[9:]) == said
    assert read_head(memoryview(sent), 0) == (6 * len(said), 4, 0, 0)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\0\2\0\0\0\2", ErrorCode.PROTOCOL_ERROR),
        (b"\0\4\x80\0\0\0", ErrorCode.FLOW_CONTROL_ERROR),
        (b"\0\5\0\0\x3f\xff", ErrorCode.PROTOCOL_ERROR),
        (b"\0\5\1\0\0\0", ErrorCode.PROTOCOL_ERROR),
        (b"\0\1\0\0\0", ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_settings_that_there_may_not_be_are_refused(payload, code):
    """RFC 9113, section 6.5.2."""
    with pytest.raises(ConnectionFaultError) as caught:
        read_settings(memoryview(payload))
    assert caught.value.code is code


@given(NUMBERS, st.binary(max_size=300), st.integers(0, 255), st.booleans())
def test_a_header_block_is_found_amid_padding_and_priorities(number, block, padding, priority):
    """As hyperframe writes them."""
    sent = theirs.HeadersFrame(number, block, pad_length=padding, depends_on=0, stream_weight=3)
    sent.flags.add("PADDED")
    if priority:
        sent.flags.add("PRIORITY")
    flags = 8 | 0x20 * priority
    assert header_fragment(flags, memoryview(sent.serialize())[9:]) == block


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05abc", b"\xff" * 9])
def test_padding_that_is_longer_than_its_frame_is_refused(payload):
    """Also where there are priorities, of five bytes."""
    with pytest.raises(ConnectionFaultError):
        header_fragment(8 | 0x20, memoryview(payload))


def test_a_number_is_four_bytes():
    """Nothing else."""
    with pytest.raises(ConnectionFaultError):
        number_of(memoryview(b"\0\0\0"))


@given(st.lists(st.tuples(st.binary(max_size=400), st.binary(max_size=400))))
def test_headers_that_nobody_remembers_are_read_by_others(pairs):
    """Whatever their length, and none of them is in a table afterwards."""
    decoder = hpack.Decoder(max_header_list_size=10**9)
    assert decoder.decode(b"".join(literal(*pair) for pair in pairs), raw=True) == pairs
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("code", [200, 405, 415])
def test_a_status_is_read_by_others(code):
    """Also one that no table has."""
    assert hpack.Decoder().decode(status(code)) == [(":status", str(code))]


NAMES = st.sampled_from(["x-a", "x-b", "grpc-timeout", "authorization", "te", "user-agent"])
LISTS = st.lists(st.tuples(NAMES, st.text(st.characters(codec="ascii", exclude_characters="\0\r\n"), max_size=9)))


@given(st.lists(LISTS, max_size=8), st.booleans(), st.integers(0, 300))
def test_blocks_are_read_as_they_were_meant_whatever_came_before(lists, huffman, size):
    """Those that only point into the tables are known from before; a table that has changed means something else."""
    encoder, reader = hpack.Encoder(), HeaderReader()
    for number, pairs in enumerate([*lists, *lists]):
        if number == len(lists) // 2:
            encoder.header_table_size = size
        block = encoder.encode(pairs, huffman=huffman)
        assert reader.read(block) == [(name.encode(), value.encode()) for name, value in pairs]


def test_a_block_means_what_the_tables_say_now():
    """The same byte is another header after each that is added."""
    reader, meant = HeaderReader(), []
    for value in (b"1", b"2", b"3"):
        reader.read(b"\x40\x01a\x01" + value)
        meant += [reader.read(b"\xbe"), reader.read(b"\xbe")]
    assert meant == [[(b"a", value)] for value in (b"1", b"1", b"2", b"2", b"3", b"3")]


@given(st.binary(max_size=2000))
def test_whatever_a_block_is_made_of_it_is_read_or_ends_the_connection(block):
    """No other error, and no list that is longer than it may be."""
    try:
        found = HeaderReader().read(block)
    except ConnectionFaultError as error:
        ended = error.code
    else:
        ended = None
        assert sum(len(name) + len(value) + 32 for name, value in found) <= 16_384
    assert ended in {None, ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM}


USUAL = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a")]


@pytest.mark.parametrize(
    "wrong",
    [
        USUAL[1:], USUAL[:2], [*USUAL, USUAL[0]], [*USUAL[:2], (b":path", b"")], [*USUAL, (b":status", b"200")],
        [USUAL[0], (b"a", b"b"), *USUAL[1:]], [*USUAL, (b"Upper", b"")], [*USUAL, (b"", b"")], [*USUAL, (b"a b", b"")],
        [*USUAL, (b"connection", b"close")], [*USUAL, (b"transfer-encoding", b"chunked")], [*USUAL, (b"te", b"gzip")],
        [*USUAL, (b"a", b"b\r\nc: d")], [*USUAL, (b"a", b" b")], [*USUAL, (b"a", b"b\t")], [*USUAL, (b"a", b"\0")],
        [*USUAL, (b"content-length", b"+1")], [*USUAL, (b"content-length", b"1, 1")],
    ],
)  # fmt: skip
def test_headers_that_no_request_may_have_are_refused(wrong):
    """RFC 9113, section 8: what others might understand otherwise."""
    with pytest.raises(MalformedError):
        length_of(request_of(wrong))


def test_headers_are_found_by_their_names():
    """Of those that are there more than once, all values."""
    found = request_of([*USUAL, (b"a", b"1"), (b"a", b"2"), (b"content-length", b"12")])
    assert (found[b":path"], found[b"a"], length_of(found)) == (b"/a", b"1, 2", 12)
    assert length_of(request_of(USUAL)) is None
    check_trailers([(b"a", b"1")])
    with pytest.raises(MalformedError):
        check_trailers([USUAL[0]])


def test_a_frame_has_its_length_before_it():
    """Nine bytes, and the payload."""
    assert read_head(memoryview(frame(6, 1, 5, b"x" * 70_000)), 0) == (70_000, 6, 1, 5)
