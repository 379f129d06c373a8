# SPDX-License-Identifier: Apache-2.0
"""Which transport NIXL uses is read from UCX's report; what is not allowed, or not one-sided, is refused."""

from __future__ import annotations

import itertools

import pytest

from blink.errors import ConfigError
from blink.link.rdma.ucx import check_transports, transports_of

# What UCX 1.23 writes, shortened: the agent's connection to itself, one to a peer, and the way of messages.
_REPORT = """\
[1795292361.926093] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292361.926093] [host:28274:0]   | one self cfg#0                                           |
[1795292361.926093] [host:28274:0]   | remote memory write by ucp_put* from host memory to host |
[1795292361.926093] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292361.926093] [host:28274:0]   | Range  | Description |              Config               |
[1795292361.926093] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292361.926093] [host:28274:0]   | 0..inf | zero-copy   | self/memory                       |
[1795292361.926093] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292362.073890] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292362.073890] [host:28274:0]   | one intra-node cfg#1                                     |
[1795292362.073890] [host:28274:0]   | remote memory WHAT                      from host memory |
[1795292362.073890] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292362.073890] [host:28274:0]   | Range  | Description |              Config               |
[1795292362.073890] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292362.073890] [host:28274:0]   | 0..2038  | short     | FIRST                             |
[1795292362.073890] [host:28274:0]   | 2039..inf | zero-copy | SECOND                           |
[1795292362.073890] [host:28274:0]   +--------+-------------+-----------------------------------+
[1795292362.074718] [host:28274:0]   +------------+--------------------+---------------+
[1795292362.074718] [host:28274:0]   | one intra-node cfg#1                            |
[1795292362.074718] [host:28274:0]   | active message by ucp_am_send* from host memory |
[1795292362.074718] [host:28274:0]   +------------+--------------------+---------------+
[1795292362.074718] [host:28274:0]   |   Range    |    Description     |    Config     |
[1795292362.074718] [host:28274:0]   +------------+--------------------+---------------+
[1795292362.074718] [host:28274:0]   |          0 | short              | tcp/lo        |
[1795292362.074718] [host:28274:0]   +------------+--------------------+---------------+
"""


def report(what: str, first: str, second: str) -> str:
    return _REPORT.replace("WHAT", what).replace("FIRST", first).replace("SECOND", second)


@pytest.mark.parametrize("what", ["write by ucp_put*", "read by ucp_get*(fast-completion)"])
def test_the_transports_of_writes_and_reads_to_peers_are_found(what: str) -> None:
    lanes = "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
    assert transports_of(report(what, "cma/memory", lanes), "one") == {"cma", "rc_mlx5"}


def test_the_transports_of_another_agent_do_not_count() -> None:
    assert transports_of(report("write by ucp_put*", "cma/memory", "cma/memory"), "another") == set()


# Which transports of UCX are known to leave the target's processor alone in a put or get.
_ONE_SIDED = {
    "rc_verbs": True,
    "rc_mlx5": True,
    "dc_mlx5": True,
    "cma": True,
    "knem": True,
    "xpmem": True,
    "ud_verbs": False,
    "ud_mlx5": False,
    "tcp": False,
    "sysv": False,
    "posix": False,
}
# Names in --nixl-transports, and the transports that each stands for.
_NAMES = {
    "rc": {"rc_verbs", "rc_mlx5"},
    "rc_mlx5": {"rc_mlx5"},
    "dc": {"dc_mlx5"},
    "ud": {"ud_verbs", "ud_mlx5"},
    "cma": {"cma"},
    "tcp": {"tcp"},
}


def is_accepted(used: set[str], allowed: str) -> bool:
    try:
        check_transports(used, allowed)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("allowed", [",".join(pair) for pair in itertools.combinations(_NAMES, 2)] + list(_NAMES))
def test_transports_pass_if_and_only_if_each_is_allowed_and_one_sided(allowed: str) -> None:
    permitted = set[str]().union(*(_NAMES[name] for name in allowed.split(",")))
    one_sided = {name for name, is_one_sided in _ONE_SIDED.items() if is_one_sided}
    for used in itertools.chain.from_iterable(itertools.combinations(_ONE_SIDED, count) for count in (1, 2)):
        assert is_accepted(set(used), allowed) == (set(used) <= permitted & one_sided), used


@pytest.mark.parametrize(
    ("used", "allowed", "reason"),
    [
        ({"cma"}, "rc", "cma, which --nixl-transports rc does not allow"),
        ({"rc_mlx5", "tcp"}, "rc", "tcp, which --nixl-transports rc does not allow"),
        ({"tcp"}, "tcp", "tcp, for which the engine's processor"),
        ({"ud_verbs"}, "rc,ud", "ud_verbs, for which the engine's processor"),
        (set[str](), "rc", "does not tell"),
    ],
)
def test_any_other_is_refused_by_name(used: set[str], allowed: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_transports(used, allowed)
