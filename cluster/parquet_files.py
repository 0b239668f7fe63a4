"""Parquet in and out, with the optional package pyarrow.

A Parquet file cannot be appended to: answers go to a JSONL journal, which is the truth, and the Parquet file is made
from it when the job is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.items import ItemError

SUFFIXES = (".parquet", ".pq")
ROWS_AT_ONCE = 4096


def is_parquet(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() in SUFFIXES


def journal_of(output: Path) -> Path:
    """Where answers are written as they come: the output itself, or JSON lines beside a Parquet file."""
    return output.with_name(f"{output.stem}.journal.jsonl") if is_parquet(output) else output


def require_pyarrow(path: Path) -> None:
    """Raises ItemError, with the command that installs it, where pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ItemError(f"{path}: Parquet needs pyarrow; pip install 'flextensor-ray[parquet]'") from None


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in order, a part of the file at a time. Raises ItemError for a file that is no Parquet."""
    require_pyarrow(path)
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError(2, "No such file", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ItemError(f"{path} cannot be read as Parquet: {first}") from error


def write_answers(journal: Path, target: Path, order: Sequence[str]) -> int:
    """Make ``target`` from the journal's lines, those of ``order`` first and in that order; the number of rows.

    A column for each key of any answer; a column whose values Parquet has no common type for becomes JSON text. Whole
    when it appears under its name. Raises ItemError when it cannot be written.
    """
    require_pyarrow(target)
    import pyarrow
    from pyarrow import parquet

    with open(journal, encoding="utf-8") as lines:
        answers = {str(answer["id"]): answer for answer in map(json.loads, lines)}
    rows = [answers.pop(key) for key in order if key in answers] + list(answers.values())
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            parquet.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        raise ItemError(f"cannot write {target}: {error.strerror or error}; the answers are in {journal}") from error
    except pyarrow.ArrowException as error:  # a type that Parquet has not, such as an empty mapping
        raise ItemError(f"cannot write {target}: {error}; the answers are in {journal}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(rows)


def _column(values: list[Any]) -> Any:
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
        escaped = isinstance(error, UnicodeEncodeError)
        texts = [None if value is None else json.dumps(value, ensure_ascii=escaped) for value in values]
        return pyarrow.array(texts, pyarrow.string())
