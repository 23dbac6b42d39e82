"""llm: its own command, with a model that its configuration names."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["KAKEYA_URL"], os.environ["KAKEYA_MODEL"]
CONFIGURED = f"""- model_id: here
  model_name: {MODEL}
  api_base: "{URL}/v1"
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(CONFIGURED)
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    for asked in (["Name a river."], ["-c", "Another one."], ["--no-stream", "Name a city."]):
        command = ["llm", "-m", "here", "-o", "max_tokens", "30", *asked]
        said = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip(), asked
        sys.stdout.write(said.stdout)
