"""Finding the OpenMP libraries of this process: when the map of its memory is read again, and when not."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.engines import fork

_MAPS = "7f00-7f01 r-xp 00000000 00:00 0   /opt/libs/libgomp.so.1.0.0\n7f02-7f03 r--p 00000000 00:00 0\n"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The last number is how many libraries the system says were loaded."""
    counts: list[int | None] = [1]
    monkeypatch.setattr(fork, "_known", None)
    monkeypatch.setattr(fork, "_count_loads", lambda: counts[-1])
    return counts


def test_maps_are_read_again_only_when_a_library_was_loaded(tmp_path: Path, loads: list[int | None]) -> None:
    maps = tmp_path / "maps"
    maps.write_text("")
    assert fork._loaded_libraries(maps) == ()
    maps.write_text(_MAPS)
    assert fork._loaded_libraries(maps) == ()
    loads.append(2)
    assert fork._loaded_libraries(maps) == ("/opt/libs/libgomp.so.1.0.0",)


def test_where_loads_are_not_counted_maps_are_read_each_time(tmp_path: Path, loads: list[int | None]) -> None:
    loads.append(None)
    maps = tmp_path / "maps"
    maps.write_text("")
    assert fork._loaded_libraries(maps) == ()
    maps.write_text(_MAPS)
    assert fork._loaded_libraries(maps) == ("/opt/libs/libgomp.so.1.0.0",)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_count_grows_with_a_loaded_library() -> None:
    before = fork._count_loads()
    assert before is not None
    assert before > 0
    assert fork._count_loads() == before
