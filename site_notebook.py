"""A hook of mkdocs: a page shows a notebook with what its cells have printed and drawn.

The page has one line, `{% include-notebook "path" %}`. The pictures are in the notebook, and so in the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'\{%\s*include-notebook "([^"]+)"\s*%\}')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the cells of the notebook in the place of the line that names it."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        notebook = json.loads((folder / match[1]).read_text(encoding="utf-8"))
        return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))

    return _INCLUDE.sub(shown, markdown)


def _parts(cell: dict[str, Any]) -> list[str]:
    """A cell as Markdown: its text, or its program and what came out."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
        else:
            picture = "".join(output["data"]["image/png"]).replace("\n", "")
            parts.append(f'<img alt="What the cell above draws" src="data:image/png;base64,{picture}">')
    return parts
