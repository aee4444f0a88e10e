"""Grids: what a file means, and what is wrong with it."""

from __future__ import annotations

from functools import partial

import pytest

from warmkv.config import load
from warmkv.simulator.studies.sweeps import grid
from warmkv.simulator.studies.sweeps.grid import GridError


def configure(flags):
    return load(flags=flags, environ={})


def points(tmp_path, text, **options):
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    return [grid.point(settings, configure) for settings in grid.read(file, **options)]


def test_a_mapping_is_the_product_of_its_choices(tmp_path):
    found = points(
        tmp_path,
        """
        prefix_cache: {memory_bytes: [1GiB, 4GiB], block_size: 16}
        compression.policy: [full, snapkv@0.2, {name: h2o, budget: 64}]
        """,
    )
    assert len(found) == 6
    assert {point.config.prefix_cache.block_size for point in found} == {16}
    in_force = {(p.config.prefix_cache.memory_bytes, p.config.compression.policy.label) for p in found}
    assert in_force == {(size << 30, policy) for size in (1, 4) for policy in ("full", "snapkv@0.2", "h2o@64")}
    assert all(point.ttl is None for point in found)
    assert found[1].label == "memory_bytes 1GiB, block_size 16, policy snapkv@0.2"


def test_a_list_has_a_point_each_and_each_once(tmp_path):
    found = points(tmp_path, "[{cluster.replicas: 2, ttl: 5m}, {}, {ttl: unlimited}, {ttl: 5m, cluster.replicas: 2}]")
    assert [(point.config.cluster.replicas, point.ttl) for point in found] == [(2, 300), (1, None), (1, float("inf"))]


def test_values_mean_numbers_where_they_can(tmp_path):
    (point,) = points(
        tmp_path,
        "{prefix_cache.memory_bytes: 2KiB, prefix_cache.default_ttl: 1h, ttl: 90s, routing.policy: power_of_two, "
        "compression.policy: 'snapkv@0.20', prefix_cache.ttls.1h: 1800, prefix_cache.ttls.5m: 60, "
        "pricing.write.1h: 1, pricing.write.5m: 1, prefix_cache.enabled: [false], simulator.step_a: 1.0e-5}",
    )
    assert {path: point.value(path) for path in point.settings} == {
        "prefix_cache.memory_bytes": 2048,
        "prefix_cache.default_ttl": 1800,
        "ttl": 90,
        "routing.policy": "power_of_two",
        "compression.policy": "snapkv@0.2",
        "prefix_cache.ttls.1h": 1800,
        "prefix_cache.ttls.5m": 60,
        "pricing.write.1h": 1,
        "pricing.write.5m": 1,
        "prefix_cache.enabled": "False",
        "simulator.step_a": 1e-5,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefix_cache.memory_byte: [1GiB]", "memory_byte: unknown key; did you mean 'memory_bytes'?"),
        ("prefix_cash.memory_bytes: [1GiB]", "prefix_cash.memory_bytes: unknown key; did you mean 'prefix_cache'?"),
        ("tttl: [5m]", "tttl: unknown key; did you mean 'ttl'?"),
        ("ttl.x: [5m]", "ttl.x: unknown key"),
        ("engine.max_slots.x: [1]", "engine.max_slots"),
        ("engine.max_slots: [1, none]", "max_slots none"),
        ("compression.policy: [magic]", "compression.policy.name"),
        ("{compression.policy: [full], compression.policy.budget: [0.2]}", "one contains the other"),
        ("{compression.policy.budget: [0.2], compression.policy: [full]}", "one contains the other"),
        ("{cluster.replicas: [1], cluster: {replicas: [2]}}", "cluster.replicas is given twice"),
        ("cluster.replicas: []", "cluster.replicas: no value"),
        ("ttl: [soon]", "'soon' is no time"),
        ("ttl: [0]", "a TTL must be a positive number"),
        ("prefix_cache.default_ttl: [2h]", "is not one of ttls"),
        ("", "write a mapping"),
        ("just words", "write a mapping"),
        ("{", "is not YAML"),
        ("[3]", "point 1: expected a mapping"),
        ("{5: [1]}", "5 is no configuration path"),
        ("{a=b: [1]}", "a=b is no configuration path"),
        ("{engine.max_slots: [1, 2, 3], engine.max_queue: [1, 2]}", "6 points, more than 5"),
        ("[{}, {}, {}, {}, {}, {}]", "6 points, more than 5"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, says):
    with pytest.raises(GridError) as error:
        points(tmp_path, text, most=5)
    assert says in str(error.value)


def test_a_fault_in_one_of_many_points_names_the_point(tmp_path):
    with pytest.raises(GridError, match=r"max_slots 0, replicas 2: engine.max_slots"):
        points(tmp_path, "{engine.max_slots: [1, 0], cluster.replicas: 2}")


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(GridError, match="cannot read"):
        grid.read(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GridError, match="not UTF-8"):
        grid.read(tmp_path / "bytes")


def test_huge_products_are_refused_before_they_are_made(tmp_path):
    axes = "\n".join(f"prefix_cache.ttls.x{n}: {list(range(100))}" for n in range(12))
    with pytest.raises(GridError, match="points, more than 10,000"):
        points(tmp_path, axes)


def test_names_are_as_short_as_they_tell_apart():
    paths = ["prefix_cache.memory_bytes", "prefix_cache.host.memory_bytes", "cluster.replicas", "ttl"]
    assert grid.short_names(paths) == {
        "prefix_cache.memory_bytes": "prefix_cache.memory_bytes",
        "prefix_cache.host.memory_bytes": "host.memory_bytes",
        "cluster.replicas": "replicas",
        "ttl": "ttl",
    }


def test_a_digest_does_not_depend_on_the_order_but_on_everything_else():
    assert grid.digest({"a": 1, "b": 2}) == grid.digest({"b": 2, "a": 1})
    others = [grid.digest(*arguments) for arguments in [({"a": 1},), ({"a": "1"},), ({"b": 1},), ({"a": 1}, "x")]]
    assert len(set(others)) == 4


def test_a_grid_wins_over_flags_and_files(tmp_path):
    file = tmp_path / "warmkv.yaml"
    file.write_text("cluster: {replicas: 2}\nengine: {max_slots: 3}\n")
    base = partial(load, file, environ={})
    point = grid.point({"cluster.replicas": 7}, lambda flags: base(flags=["cluster.replicas=4", *flags]))
    assert (point.config.cluster.replicas, point.config.engine.max_slots) == (7, 3)
