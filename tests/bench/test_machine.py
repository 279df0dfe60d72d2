"""What a figure says about its machine, and the two limits of it that are measured."""

from __future__ import annotations

from openk3.bench.machine import describe, matmul, read_bandwidth, running_commit


def test_the_machine_is_described() -> None:
    told = describe()
    assert told["cpu"] and told["memory_bytes"] > 1 << 28 and told["cores"] >= 1


def test_the_commit_is_hexadecimal_or_said_to_be_unknown() -> None:
    commit = running_commit().removesuffix("+changes")
    assert commit == "unknown" or int(commit, 16) >= 0


def test_a_matrix_product_tells_its_flops() -> None:
    product = matmul(size=64)
    product.run()
    assert product.facts == {"flops": 2 * 64**3}


def test_read_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < read_bandwidth(bytes_=1 << 24, rounds=3) < 1e13
