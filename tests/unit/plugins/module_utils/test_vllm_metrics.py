# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Counters of a real scrape, and what two scrapes say of speculative decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.vllm_metrics import (
    Counters,
    counters,
    samples,
    spec_decode,
    wedged,
)
from prometheus_client.parser import text_string_to_metric_families

FIXTURES = Path(__file__).parents[3] / "fixtures/vllm"
SCRAPE = (FIXTURES / "metrics-0.32.txt").read_text()


def scrape(drafts: float, drafted: float, accepted: float, positions: tuple[float, ...] = (), engine: str = "0") -> str:
    lines = [
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f'vllm:spec_decode_num_drafts_total{{engine="{engine}",model_name="m"}} {drafts}',
        f'vllm:spec_decode_num_draft_tokens_total{{model_name="m",engine="{engine}"}} {drafted}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}",model_name="m"}} {accepted}',
        f'vllm:spec_decode_num_accepted_tokens_total_created{{engine="{engine}",model_name="m"}} 1.77e+09',
        f'vllm:spec_decode_num_accepted_tokens_created{{engine="{engine}",model_name="m"}} 1.77e+09',
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}",engine="{engine}",model_name="m"}} {value}'
        for i, value in enumerate(positions)
    ]
    return "\n".join(lines) + "\n"


def test_samples_are_those_that_the_reference_parser_finds() -> None:
    expected = sorted(
        (s.name, tuple(sorted(s.labels.items())), s.value) for family in text_string_to_metric_families(SCRAPE) for s in family.samples
    )
    found = sorted((name, tuple(sorted(labels.items())), value) for name, labels, value in samples(SCRAPE))
    assert found == expected


def test_a_real_scrape() -> None:
    now = counters(SCRAPE)
    assert (now.drafts, now.drafted, now.accepted, now.per_position) == (125.0, 250.0, 1.0, (1.0, 0.0))
    assert (now.generation_tokens, now.running) == (128.0, 0.0)
    spec = spec_decode(Counters(), now)
    assert spec == {"state": "active", "drafts": 125, "drafted": 250, "accepted": 1, "per_position": [0.008, 0.0], "acceptance": 0.004}


@pytest.mark.parametrize(
    ("before", "after", "state", "drafted", "accepted", "acceptance"),
    [
        (scrape(250, 500, 300), scrape(275, 550, 334), "active", 50, 34, 0.68),
        (scrape(250, 500, 300), scrape(250, 500, 300), "unknown", 0, 0, None),
        (scrape(250, 500, 300), scrape(260, 520, 300), "dead_draft", 20, 0, 0.0),
        (scrape(250, 500, 300), scrape(10, 20, 14), "active", 20, 14, 0.7),  # restarted meanwhile
        (scrape(250, 500, 300), scrape(300, 600, 14), "active", 600, 14, 0.0233),  # nonsense is not negative
        ("", scrape(10, 20, 14), "active", 20, 14, 0.7),
        (scrape(250, 500, 300), "", "off", 0, 0, None),
        ("# no such counters\nvllm:generation_tokens_total 5\n", "vllm:generation_tokens_total 9\n", "off", 0, 0, None),
        ("", "<html>not found</html>", "off", 0, 0, None),
    ],
)
def test_between_two_scrapes(before: str, after: str, state: str, drafted: int, accepted: int, acceptance: float | None) -> None:
    spec = spec_decode(counters(before), counters(after))
    assert (spec["state"], spec["drafted"], spec["accepted"], spec["acceptance"]) == (state, drafted, accepted, acceptance)


def test_several_engines_are_summed_and_positions_are_rates() -> None:
    before = counters(scrape(10, 20, 10, (8, 2)) + scrape(5, 10, 5, (4, 1), engine="1"))
    after = counters(scrape(20, 40, 24, (16, 8)) + scrape(15, 30, 17, (12, 5), engine="1"))
    spec = spec_decode(before, after)
    assert (spec["drafts"], spec["drafted"], spec["accepted"]) == (20, 40, 26)
    assert spec["per_position"] == [0.8, 0.5]


@pytest.mark.parametrize(
    "line",
    [
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\" {c}, d"} 7',
        'vllm:spec_decode_num_drafts_total{ engine = "0", model_name="m", } 7 1700000000000',
        "vllm:spec_decode_num_drafts_total 7.0",
        "vllm:spec_decode_num_drafts_total{} 7e0",
        'vllm:spec_decode_num_drafts{engine="0"} 7',
    ],
)
def test_spellings_of_a_sample(line: str) -> None:
    assert counters(line).drafts == 7.0


@pytest.mark.parametrize(
    "line", ["vllm:spec_decode_num_drafts_total{x NaN", "vllm:spec_decode_num_drafts_total NaN", "vllm:x", "{} 4", "\x00"]
)
def test_what_is_no_number_counts_nothing(line: str) -> None:
    assert counters(line) == Counters()


@pytest.mark.parametrize("position", ["9" * 5000, "64", "100000000", "\u0663", "\u00b2", "-1", "", "1.0"])
def test_what_is_no_position_is_left_out(position: str) -> None:
    odd = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} 3\n'
    assert counters(scrape(1, 2, 1, (4, 2)) + odd).per_position == (4.0, 2.0)


def test_sums_stay_finite() -> None:
    huge = "vllm:spec_decode_num_drafts_total 1.7e308\nvllm:spec_decode_num_draft_tokens_total -1e300\n"
    assert spec_decode(counters(""), counters(huge * 3 + scrape(1, 2, 1)))["drafts"] == 1


@pytest.mark.parametrize(("before", "after"), [(None, counters(SCRAPE)), (counters(SCRAPE), None), (None, None)])
def test_a_scrape_that_failed_is_no_zero(before: Counters | None, after: Counters | None) -> None:
    spec = spec_decode(before, after)
    assert spec == {"state": "unknown", "drafts": 0, "drafted": 0, "accepted": 0, "per_position": [], "acceptance": None}


@pytest.mark.parametrize(
    ("running", "later", "tokens", "stuck"), [(2, 2, 1000, True), (2, 2, 1001, False), (0, 0, 1000, False), (2, 0, 1000, False)]
)
def test_wedged(running: int, later: int, tokens: int, stuck: bool) -> None:
    before = counters(f"vllm:generation_tokens_total 1000\nvllm:num_requests_running {running}\n")
    after = counters(f"vllm:generation_tokens_total {tokens}\nvllm:num_requests_running {later}\n")
    assert wedged(before, after) is stuck
