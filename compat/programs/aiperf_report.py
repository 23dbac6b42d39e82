"""aiperf's report: every request ended well, and every answer is as long as was asked for."""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1], "profile_export_aiperf.json").read_text())
assert report["is_complete"], report["error_summary"]
assert not report["error_summary"], report["error_summary"]
assert report["completed_request_count"]["avg"] == 8, report["completed_request_count"]
lengths = report["output_sequence_length"]
assert lengths["min"] == lengths["max"] == 24, lengths
sys.stdout.write(f"{report['completed_request_count']['avg']:.0f} requests without errors\n")
