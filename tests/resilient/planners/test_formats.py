"""Files of samples: LLaVA's JSON, manifests, tables of lengths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from resilient.planners.formats import read_records
from resilient.planners.records import Records, sample_table


def write(path: Path, content: Any) -> Path:
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
    assert pictures(records) == [(0, 32, 20), (1, 0, 0), (2, 0, 0)]
    _, bad = sample_table(records, "qwen2-vl-7b", bad="drop")
    assert [(each.name, each.reason) for each in bad] == [
        (name, "a picture of 0 x 0 pixels, smaller than 14") for name in ("b", "c")
    ]
    message = "pictures of 'a' must have sizes, got a.png alone; say in which folder they are"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_records(path)


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,width,height\nx,wide,3\n", "width of 'x' in a.csv must be a number from 0 on, got 'wide'; "
         "correct the file"),
        ("a.csv", "id,duration\nx,-3\n", "duration of 'x' in a.csv must be a number from 0 on, got '-3'; "
         "correct the file"),
        ("a.csv", "id,duration\nx,nan\n", "duration of 'x' in a.csv must be a number from 0 on, got 'nan'; "
         "correct the file"),
        ("a.json", [{"id": "x", "width": [3, 4], "height": [5]}], "pictures of 'x' must have a width and a height "
         "each, got 2 widths and 1 heights; correct the file"),
        ("a.json", [{"id": "x", "size": [3, 4, 5]}], "sizes of 'x' must be of width and height, got [3, 4, 5]; "
         "correct the file"),
        ("a.json", [3], "a.json must be a json file of samples, got Expected `object`, got `int` - at `$[0]`; "
         "correct it"),
        ("a.parquet", "", "a file of samples must end in .csv, .json or .jsonl, got 'a.parquet'; rename or convert it"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_records(write(tmp_path / name, content))
