"""guidellm's reports: every request ended well, and every answer is as long as was asked for.

    python compat/programs/guidellm_reports.py FOLDER

It runs in our own environment, and makes of both reports one that `kakeya bench report` can show: FOLDER's
guidellm.json, of a few kB.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kakeya.bench.machine import machine_facts
from kakeya.bench.report import Report, write_file

Fields = Mapping[str, Any]
WAYS = {"responses": "Responses, the server has the history", "chat": "chat completions, which resend it"}


def main(folder: Path) -> None:
    told = {way: json.loads((folder / f"guidellm-{way}.json").read_text()) for way in WAYS}
    benchmarks = {way: report["benchmarks"][0] for way, report in told.items()}
    for way, benchmark in benchmarks.items():
        _check(way, benchmark, told[way]["config"]["spec"])
    report = _report(told["responses"], benchmarks)
    write_file("report", folder / "guidellm.json", report.to_json())
    sys.stdout.write(report.to_json())


def _check(way: str, benchmark: Fields, spec: Fields) -> None:
    requests = benchmark["requests"]
    assert not requests["errored"], (way, requests["errored"][0])
    asked = spec["constraints"][0]["count"]
    assert len(requests["successful"]) == asked, (way, len(requests["successful"]), asked)
    lengths = {each["output_metrics"]["text_tokens"] for each in requests["successful"]}
    assert lengths == {spec["data"][0]["output_tokens"]}, (way, lengths)
    by_turn = _by_turn(requests["successful"])
    for before, after in pairwise(by_turn.values()):
        # What was read before is held, so that a turn computes what is new.
        assert min(map(_cached, after)) >= min(map(_prompt, before)), way


def _report(told: Fields, benchmarks: Mapping[str, Fields]) -> Report:
    spec = told["config"]["spec"]
    data = spec["data"][0]
    settings = {
        "guidellm": told["metadata"]["guidellm_version"],
        "model": spec["backend"]["model"],
        "streams": spec["profile"]["streams"],
        **{name: data[name] for name in ("prompt_tokens", "output_tokens", "turns")},
    }
    ways = [_figures(way, benchmark) for way, benchmark in benchmarks.items()]
    turns = [row for way, benchmark in benchmarks.items() for row in _turns(way, benchmark)]
    times = [benchmark[name] for benchmark in benchmarks.values() for name in ("start_time", "end_time")]
    return Report(
        "guidellm",
        settings,
        machine_facts(),
        {"ways": ways, "turns": turns},
        started_at=_moment(min(times)),
        finished_at=_moment(max(times)),
    )


def _figures(way: str, benchmark: Fields) -> dict[str, Any]:
    """One way's figures, as guidellm counts them."""
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    return {
        "way": WAYS[way],
        "requests": totals["total"],
        "successful": totals["successful"],
        "seconds": round(benchmark["duration"], 2),
        "time_to_first_token_ms": _median(metrics["time_to_first_token_ms"]),
        "inter_token_latency_ms": _median(metrics["inter_token_latency_ms"]),
        "request_latency_s": _median(metrics["request_latency"]),
        "requests_per_second": round(metrics["requests_per_second"]["successful"]["mean"], 3),
        "output_tokens_per_second": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
    }


def _turns(way: str, benchmark: Fields) -> list[dict[str, Any]]:
    """What a turn costs while the history grows: medians."""
    by_turn = _by_turn(benchmark["requests"]["successful"])
    timed = {each["turn_index"]: each for each in benchmark["metrics"]["turns"]}
    return [
        {
            "way": WAYS[way],
            "turn": turn + 1,
            "prompt_tokens": statistics.median(map(_prompt, group)),
            "computed_tokens": statistics.median(map(_computed, group)),
            "time_to_first_token_ms": _median(timed[turn]["time_to_first_token_ms"]),
            "inter_token_latency_ms": _median(timed[turn]["inter_token_latency_ms"]),
        }
        for turn, group in by_turn.items()
    ]


def _by_turn(requests: Sequence[Fields]) -> dict[int, list[Fields]]:
    turns = sorted({each["info"]["turn_index"] for each in requests})
    return {turn: [each for each in requests if each["info"]["turn_index"] == turn] for turn in turns}


def _prompt(request: Fields) -> int:
    return int(request["input_metrics"]["text_tokens"])


def _cached(request: Fields) -> int:
    return int(request["input_metrics"]["cached_tokens"] or 0)


def _computed(request: Fields) -> int:
    return _prompt(request) - _cached(request)


def _median(metric: Fields) -> float:
    return round(float(metric["successful"]["median"]), 2)


def _moment(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds")


main(Path(sys.argv[1]))
