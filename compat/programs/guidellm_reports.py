"""guidellm's reports: every request ended well, and every answer is as long as was asked for."""

import json
import sys
from pathlib import Path

for path in sorted(Path(sys.argv[1]).glob("guidellm-*.json")):
    [benchmark] = json.loads(path.read_text())["benchmarks"]
    requests = benchmark["requests"]
    totals = {kind: len(each) for kind, each in requests.items() if isinstance(each, list)}
    assert totals["successful"] >= 20, (path.name, totals)
    assert not totals["errored"], (path.name, requests["errored"][0])
    lengths = {each["output_metrics"]["text_tokens"] for each in requests["successful"]}
    assert lengths == {32}, (path.name, lengths)
    sys.stdout.write(f"{path.name}: {totals}\n")
