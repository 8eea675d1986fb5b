"""Files of samples: LLaVA's JSON, manifests, tables of lengths."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from resilient.planners.workloads.formats import read_records
from resilient.planners.workloads.records import Records, sample_table


def write(path: Path, content: Any) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
        return path
    if path.suffix == ".jsonl":
        content = "\n".join(map(json.dumps, content))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def pictures(records: Records) -> list[tuple[int, int, int]]:
    return list(zip(records.picture_of.tolist(), records.widths.tolist(), records.heights.tolist(), strict=True))


LLAVA = [
    {
        "id": "chart-1",
        "image": "a.png",
        "width": 640,
        "height": 480,
        "conversations": [
            {"from": "human", "value": "<image>\nWhat does it show?"},
            {"from": "gpt", "value": "A bar chart."},
        ],
    },
    {"id": 2, "image": ["b.png", "c.png"], "image_sizes": [[300, 200], [20, 30]], "conversations": []},
    {"id": "text", "conversations": [{"from": "human", "value": "Hello"}]},
]


def test_llavas_json_with_sizes(tmp_path: Path) -> None:
    records = read_records(write(tmp_path / "train.json", LLAVA))
    assert records.names == ("chart-1", "2", "text")
    assert pictures(records) == [(0, 640, 480), (1, 300, 200), (1, 20, 30)]
    assert records.text.tolist() == [10, 0, 2]  # 7 words, none, 1
    by_letter = read_records(tmp_path / "train.json", tokenizer=lambda text: list(text.encode()))
    assert by_letter.text.tolist() == [len("What does it show?\nA bar chart."), 0, 5]


def test_sizes_are_read_from_the_pictures_where_the_file_has_none(tmp_path: Path) -> None:
    Image.new("RGB", (32, 20)).save(tmp_path / "a.png")
    (tmp_path / "c.png").write_bytes(b"no picture")
    rows = [{"id": name, "image": f"{name}.png", "text": "a word"} for name in ("a", "b", "c")]
    path = write(tmp_path / "train.jsonl", rows)
    records = read_records(path, pictures=tmp_path)
    assert pictures(records) == [(0, 32, 20)]
    _, bad = sample_table(records, "qwen2-vl-7b", bad="drop")
    opened = f"a picture that cannot be opened: cannot identify image file '{tmp_path / 'c.png'}'"
    assert [(each.name, each.reason, each.dropped) for each in bad] == [
        ("b", "no picture b.png", True),
        ("c", opened, True),
    ]
    assert read_records(path).flaws[0] == "no size of a.png, nor the folder of pictures to find it in"


def test_pictures_too_large_to_open_are_told_by_their_header(tmp_path: Path) -> None:
    header = (60000).to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
    chunks = ((name + content, len(content)) for name, content in ((b"IHDR", header), (b"IDAT", b"")))
    png = [size.to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk, size in chunks]
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(png))
    records = read_records(write(tmp_path / "a.jsonl", [{"image": "bomb.png", "text": "x"}]), pictures=tmp_path)
    assert records.flaws[0].startswith("a picture that cannot be opened: Image size (3600000000 pixels) exceeds")


def test_manifests_of_recordings(tmp_path: Path) -> None:
    rows = [
        {"audio_filepath": "x/1.wav", "duration": 3.5, "text": "four words are here"},
        {"audio_filepath": "x/2.wav", "duration": [1, 2.5], "text": ""},
    ]
    records = read_records(write(tmp_path / "manifest.jsonl", rows))
    assert records.names == ("x/1.wav", "x/2.wav")
    assert (records.sound_of.tolist(), records.seconds.tolist()) == ([0, 1, 1], [3.5, 1.0, 2.5])
    assert records.text.tolist() == [6, 0]
    table = "split,utt_id,duration_s,words,chars\ndev,1-2,5.855,18,89\ndev,1-3,4.8,0,0\n"
    records = read_records(write(tmp_path / "speech.csv", table))
    assert records.names == ("1-2", "1-3")
    assert (records.seconds.tolist(), records.text.tolist()) == ([5.855, 4.8], [24, 0])


def test_tables_of_lengths(tmp_path: Path) -> None:
    sizes = "image_name,width,height,image_tokens_p14m2\na.jpg,480,360,289\nb.jpg,1,1,\n"
    records = read_records(write(tmp_path / "sizes.csv", sizes))
    assert (records.names, pictures(records)) == (("a.jpg", "b.jpg"), [(0, 480, 360), (1, 1, 1)])
    assert records.text.tolist() == [0, 0]
    captions = "image_id,width,height,num_captions,caption_words_total,caption_words_first\n139,640,426,5,48,9\n"
    assert read_records(write(tmp_path / "coco.csv", captions)).text.tolist() == [12]
    lengths = read_records(write(tmp_path / "lengths.csv", "tokens\n5\n1200\n"))
    assert (lengths.names, lengths.text.tolist()) == (("lengths.csv:0", "lengths.csv:1"), [5, 1200])


def test_files_are_read_however_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_bytes("\ufeffID, Tokens, Width,height\r\n图像-é, 5, 640, 480\r\n".encode())
    records = read_records(tmp_path / "a.CSV")
    assert (records.names, records.text.tolist(), pictures(records)) == (("图像-é",), [5], [(0, 640, 480)])
    rows = [{"id": "🐈", "text": "two words"}, {"id": "b", "text": None, "image_sizes": []}]
    (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n\n")
    records = read_records(tmp_path / "b.jsonl")
    assert (records.names, records.text.tolist(), records.flaws) == (("🐈", "b"), [3, 0], ("", ""))


TURNS = "conversations that are not a list of turns with a value each: "


@pytest.mark.parametrize(
    ("row", "flaw"),
    [
        ({"width": "wide", "height": 3}, "width 'wide', which is no number from 0 on"),
        ({"width": True, "height": 3}, "width True, which is no number from 0 on"),
        ({"duration": -3}, "duration -3, which is no number from 0 on"),
        ({"duration": "nan"}, "duration 'nan', which is no number from 0 on"),
        ({"tokens": [1] * 99}, f"tokens {repr([1] * 99)[:60]}..., which is no number from 0 on"),
        ({"width": [3, 4], "height": [5]}, "2 widths and 1 heights of pictures"),
        ({"size": [3, 4, 5]}, "sizes [3, 4, 5], which are not of width and height"),
        ({"size": 12345}, "sizes 12345, which are not of width and height"),
        ({"image_size": {"width": 3}}, "sizes {'width': 3}, which are not of width and height"),
        ({"image": ["a.png", "b.png"]}, "no size of a.png, b.png, nor the folder of pictures to find it in"),
        ({"audio_filepath": "a.wav"}, "no duration of a.wav"),
        ({"conversations": "hi"}, f"{TURNS}'hi'"),
        ({"conversations": [{"from": "human"}]}, TURNS + "[{'from': 'human'}]"),
        ({"conversations": [{"value": "<image> or <image>"}], "size": [30, 40]}, "2 marks <image> for 1 items"),
    ],
)
def test_what_is_wrong_with_a_sample_is_its_flaw(tmp_path: Path, row: dict[str, Any], flaw: str) -> None:
    good = {"id": "y", "size": [300, 200], "duration": 3, "text": "one"}
    records = read_records(write(tmp_path / "a.json", [{"id": "x", "text": "one two", **row}, good]))
    assert records.flaws == (flaw, "")
    assert (pictures(records), records.sound_of.tolist(), records.text.tolist()) == ([(1, 300, 200)], [1], [0, 2])


def test_rows_of_other_widths_than_the_header_are_flaws(tmp_path: Path) -> None:
    records = read_records(write(tmp_path / "a.csv", "id,text,width,height\nx,hi\ny,well, hi,30,40\nz,hi,30,40\n"))
    assert records.flaws == ("2 columns, where the file has 4", "5 columns, where the file has 4", "")


COLUMNS = (
    "audio, audio_filepath, caption, caption_words_first, conversations, duration, duration_s, durations, height, "
    "heights, image, image_size, image_sizes, length, num_words, seconds, sentence, size, text, text_tokens, tokens, "
    "transcript, width, widths, words"
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", [3], "a.json must be a json file of samples, got Expected `object`, got `int` - at `$[0]`; "
         "correct it"),
        ("a.json", '[{"id": 3', "a.json must be a json file of samples, got Input data was truncated; correct it"),
        ("a.jsonl", [{"id": "x", "text": "y"}, 3], "a.jsonl must be a jsonl file of samples, got Expected `object`, "
         "got `int` in line 2; correct it"),
        ("a.csv", b"id,tokens\n\xe9,5\n", "a.csv must be a csv file of samples, got 'utf-8' codec can't decode byte "
         "0xe9 in position 10: invalid continuation byte; correct it"),
        ("a.csv", "id,tokens\n", "a.csv must have samples, got none; see whether it is the right file"),
        ("a.json", "", "a.json must have samples, got none; see whether it is the right file"),
        ("a.csv", "id;tokens\nx;5\n", f"a.csv must have columns of pictures, sound or text ({COLUMNS}), got id;tokens; "
         "rename them"),
        ("a.parquet", "", "workload must end in .csv, .json, .jsonl, got 'PATH'; rename or convert it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=f"^{re.escape(message.replace('PATH', str(path)))}$"):
        read_records(path)
