"""Files of prompts: what they ask for, and what is wrong with them, by line and field."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashforward_core.commands.prompt_files import Wanted, read_prompts, shard_of
from flashforward_core.commands.results import DONE, Result, Results, file_sha256

pytestmark = pytest.mark.cpu


def read(folder: Path, name: str, text: str | bytes, *, seed: int = 0) -> tuple[Wanted, ...]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_prompts(path, seed=seed)


def test_a_line_each_with_seeds_and_names_by_place(tmp_path: Path) -> None:
    found = read(tmp_path, "p.txt", "\ufeffnoon\n\n# a comment\n  night, at last \n", seed=5)
    assert [(w.prompt, w.seed, w.out, w.seconds) for w in found] == [
        ("noon", 5, "0001.mp4", None),
        ("night, at last", 6, "0002.mp4", None),
    ]


def test_rows_say_the_same_in_json_and_in_a_table(tmp_path: Path) -> None:
    rows = '{"prompt": "noon, clear", "seed": 9, "out": "a\\\\b.mp4", "seconds": 2.5}\n\n{"prompt": "night"}\n'
    table = 'prompt,seed,out,seconds\n"noon, clear",9,a/b.mp4,2.5\nnight,,,\n'
    found = read(tmp_path, "p.jsonl", rows)
    assert found == read(tmp_path, "p.csv", table)
    assert found[0] == Wanted(number=1, prompt="noon, clear", seed=9, out="a/b.mp4", seconds=2.5)
    assert found[1] == Wanted(number=2, prompt="night", seed=1, out="0002.mp4")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.doc", "noon", "use one of: .txt, .jsonl, .csv"),
        ("p.txt", "", "holds no prompt"),
        ("p.txt", b"\xff\xfe", "is not UTF-8"),
        ("p.jsonl", "noon", "line 1 is not JSON"),
        ("p.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("p.jsonl", "[1]", "line 1 is no JSON object"),
        ("p.jsonl", '{"prompt": "a"}\n{"seed": 1}', "line 2: prompt is not given"),
        ("p.jsonl", '{"prompt": 7}', "line 1: prompt is not given"),
        ("p.jsonl", '{"prompt": "a", "sede": 1}', "line 1 has a field 'sede'"),
        ("p.jsonl", '{"prompt": "a", "seed": -1}', "seed=-1"),
        ("p.jsonl", '{"prompt": "a", "seed": true}', "seed=True"),
        ("p.jsonl", '{"prompt": "a", "seed": 1.5}', "seed=1.5"),
        ("p.jsonl", '{"prompt": "a", "seconds": NaN}', "seconds=nan"),
        ("p.jsonl", '{"prompt": "a", "seconds": "long"}', "seconds='long'"),
        ("p.jsonl", '{"prompt": "a", "out": 5}', "out=5"),
        ("p.jsonl", '{"prompt": "a", "out": "x.gif"}', "does not end in .mp4"),
        ("p.jsonl", '{"prompt": "a", "out": "x.partial.mp4"}', "prompt 1: out='x.partial.mp4' is how unfinished"),
        ("p.jsonl", '{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "line 1 is not JSON"),
        ("p.csv", "prompt\na,b\n", "more fields"),
        ("p.csv", 'prompt\n"a\n', "cannot be read as CSV"),
        ("p.csv", "prompt,out\na,x.mp4\nb,X.mp4\n", "prompts 1 and 2 both have out="),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read(tmp_path, name, text)
    assert words in str(refusal.value) and name in str(refusal.value)


@pytest.mark.parametrize(
    "out", ["/etc/x.mp4", "../x.mp4", "a/../../x.mp4", "..\\x.mp4", "C:\\x.mp4", "a\0.mp4", "\\x.mp4"]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, out: str) -> None:
    with pytest.raises(ValueError, match="leads out of the output folder"):
        read(tmp_path, "p.jsonl", json.dumps({"prompt": "a", "out": out}))


@given(count=st.integers(0, 40), parts=st.integers(1, 9))
def test_shards_are_all_and_none_twice(count: int, parts: int) -> None:
    wanted = tuple(Wanted(number=n, prompt="a", seed=0, out=f"{n}.mp4") for n in range(1, count + 1))
    shards = [shard_of(wanted, f"{part}/{parts}") for part in range(1, parts + 1)]
    assert sorted(w.number for shard in shards for w in shard) == [w.number for w in wanted]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1/0", "1", "a/b", "-1/2"])
def test_a_shard_that_is_none_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match=f"shard='{shard}'"):
        shard_of((), shard)


def done(folder: Path, name: str, *, settings: str = "s") -> Result:
    digest = file_sha256(folder / name)
    return Result(
        path=name, prompt="a", seed=0, seconds=1.0, status=DONE, settings=settings, sha256="", file_sha256=digest
    )


def test_only_a_file_as_it_was_written_is_done(tmp_path: Path) -> None:
    for name in ("whole.mp4", "damaged.mp4", "missing.mp4", "other.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    first = Results(tmp_path, shard="1/2")
    for name in ("whole.mp4", "damaged.mp4", "missing.mp4"):
        first.add(done(tmp_path, name))
    first.add(done(tmp_path, "other.mp4", settings="before"))
    with first.path.open("a") as file:
        file.write('{"path": "whole.mp4", "sta')  # a run that was killed while it wrote
    (tmp_path / "damaged.mp4").write_bytes(b"damaged.mp")
    (tmp_path / "missing.mp4").unlink()
    second = Results(tmp_path)  # another shard's lines count too
    names = ("whole.mp4", "damaged.mp4", "missing.mp4", "other.mp4")
    assert [second.is_done(name, settings="s") for name in names] == [True, False, False, False]
    again = Results(tmp_path, shard="1/2")
    again.add(done(tmp_path, "other.mp4"))  # starts a line of its own
    assert Results(tmp_path).is_done("other.mp4", settings="s")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from flashforward_core.cli import main\n"
        "try: main(['render', '--help'])\n"
        "except SystemExit: assert not {'torch', 'numpy', 'av'} & set(sys.modules), 'torch'"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "--prompts" in shown.stdout
