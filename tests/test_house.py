"""House rules that a machine can check: what may be in a tracked file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "store" / "messagestore", ROOT / "connector" / "pyspark_messagestore")

# Put together from pieces, so that this file does not contain what it looks for.
REGISTRY = re.compile(
    r"(py" r"pi|python" r"hosted|ana" r"conda|npm" r"js|repo1\.ma" r"ven|repo\.ma" r"ven\.apache)\.(org|com|io)",
    re.IGNORECASE,
)
MACHINE_PATH = re.compile(r"(?<![\w.>}*-])/(?:work|root|home|Users)/[\w.]")


def tracked_files() -> list[Path]:
    """What git tracks or would track; in a copy without git, everything that is not hidden (and `.ci`)."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = [str(path) for path in found if not any(part[0] == "." and part != ".ci" for part in path.parts)]
    return [path for path in (ROOT / name for name in names) if path.is_file() and path.suffix != ".pyc"]


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every tracked text file; golden files and other bytes are not text."""
    found = {}
    for path in tracked_files():
        try:
            found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# ---- what may be in a file


def test_the_files_are_found(texts: dict[str, str]) -> None:
    """The guard of the tests below: they look at something."""
    assert {
        "pyproject.toml",
        "README.md",
        ".ci/run",
        "tests/test_house.py",
        "store/messagestore/format/layout.py",
    } <= set(texts)


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH], ids=["registry host", "machine path"])
def test_no_file_says_where_it_was_made(texts: dict[str, str], pattern: re.Pattern[str]) -> None:
    """Where packages come from, and where a checkout lies, is the machine's business."""
    hits = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []


def test_the_patterns_bite() -> None:
    """A pattern that never matches would let everything through."""
    assert REGISTRY.search("https://files.python" + "hosted.org/x.whl")
    assert REGISTRY.search("index-url = https://py" + "pi.org/simple")
    assert MACHINE_PATH.search("see /wo" + "rk/main/x")
    assert MACHINE_PATH.search('"/ro' + 'ot/.cache"')
    assert not MACHINE_PATH.search("<root>/ro" + "ot/x and ${user.home}/store and /data/store")


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown file, as a reader's browser has them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_every_link_of_a_document_leads_somewhere(texts: dict[str, str]) -> None:
    """To a file of the repository, and to a heading of it."""
    dead, seen = [], 0
    for name, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text if name.endswith(".md") else ""):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            seen += 1
            target = (ROOT / name).parent / path if path else ROOT / name
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
                dead.append(f"{name}: {link}")
    assert dead == []
    assert seen > 30


# ---- settings and versions


def test_store_properties_is_the_defaults() -> None:
    """`conf/store.properties` names every setting once, with the value it has anyway."""
    from messagestore.format.config import StoreConfig, java_key, settings

    path = ROOT / "conf" / "store.properties"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    keys = [line.partition("=")[0] for line in lines]
    assert sorted(keys) == sorted(java_key(field.name) for field in settings())
    assert StoreConfig.load(path) == StoreConfig()


def test_the_version_is_one(project: dict) -> None:
    """The package has it, and the build reads it there: no other file says it."""
    import pyspark_messagestore

    assert "version" in project["dynamic"] and "version" not in project
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", pyspark_messagestore.__version__)


def test_every_requirement_is_pinned(project: dict) -> None:
    """`make setup` gives everybody the same versions, and takes no file that another one has put in their place."""
    asked = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    names = {re.match(r"[\w.-]+", item)[0].lower() for item in asked} - {project["name"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").replace(" \\\n", "").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert names <= {pin.partition("==")[0].lower() for pin in pins}
    unsafe = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+", pin)]
    assert unsafe == [], "make pins adds hashes"


def test_importing_the_connector_imports_nothing_heavy() -> None:
    """Spark imports every `pyspark_*` package in each of its processes, whether or not the job uses it."""
    heavy = "{'numpy', 'pyarrow', 'pyspark', 'typer', 'rich', 'messagestore'}"
    code = f"import sys, pyspark_messagestore; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Bytes of a file or a message are data: no module of ours can run what is in them."""
    runs = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "eval", "exec"}
    used = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used |= {(path.name, name.name.partition(".")[0]) for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add((path.name, (node.module or "").partition(".")[0]))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used.add((path.name, node.func.id))
    assert ("app.py", "typer") in used
    assert [(name, what) for name, what in used if what in runs] == []


def test_the_connector_asks_the_interface_only() -> None:
    """Source, sink and command line hold no view, no writer and no file of a store: one on another host has none."""
    from messagestore import spi

    deeper = {"files", "view", "disk", "paths", "commit_log", "state_file", "index", "journal"}
    found = set()
    for path in (ROOT / "connector" / "pyspark_messagestore").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        called = {node.func for node in nodes if isinstance(node, ast.Call)}  # `array.view(...)` is Arrow's
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in deeper and node not in called:
                found.add(f"{path.name}:{node.lineno}: .{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "messagestore.spi":
                unlisted = {name.name for name in node.names} - {*spi.__all__}
                found |= {f"{path.name}:{node.lineno}: {name}" for name in unlisted}
    assert sorted(found) == []


def test_only_the_writer_appends_and_publishes() -> None:
    """A batch was written and published above the writer, and nobody found the place. Recovery ends the log itself."""
    store, below = ROOT / "store" / "messagestore", {"files", "writer", "recovery"}
    found = {
        str(path.relative_to(store))
        for path in store.rglob("*.py")
        if re.search(r"\blog\.write\(|\.appended\(|\bvisible_end=", path.read_text(encoding="utf-8"))
    }
    assert {"writer/log_writer.py", "writer/whole_batch.py"} <= found
    assert [path for path in found if path.split("/")[0] not in below] == []


def test_all_code_that_calls_the_kernel_is_tested_without_it_too(texts: dict[str, str]) -> None:
    """`make test-without-kernel` runs the folders of the packages whose modules call it."""
    store = ROOT / "store" / "messagestore"
    calling = [path for path in store.rglob("*.py") if "from messagestore.format import kernel" in path.read_text()]
    folders = {f"tests/store/{path.relative_to(store).parent}" for path in calling}
    listed = re.search(r"^WITHOUT_KERNEL := (.*)$", texts["Makefile"], re.MULTILINE)
    assert listed is not None
    assert {"tests/store/format", *folders} <= set(listed[1].split())


# ---- what the documents promise


def test_documented_verbs_exist(texts: dict[str, str]) -> None:
    """`make <verb>` in a document, or in CI, is a verb of the Makefile that does something."""
    targets = set(re.findall(r"^([a-z-]+):", texts["Makefile"], re.MULTILINE))
    documents = "\n".join(text for name, text in texts.items() if name.endswith(".md"))
    used = set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", documents, re.MULTILINE))
    used |= set(re.findall(r"^ *(?:step|make --no-print-directory) ([a-z-]+)", texts[".ci/run"], re.MULTILINE))
    assert used <= targets
    assert {"setup", "test", "lint", "typecheck", "bench", "docs"} <= targets


def test_decisions_beside_a_package_are_found(texts: dict[str, str]) -> None:
    """ARCHITECTURE.md links each README of a package, the site shows it, and each decision has its three parts."""
    beside = [
        name
        for name in texts
        if re.fullmatch(r"(store/messagestore|connector/pyspark_messagestore)/.*README\.md", name)
    ]
    assert len(beside) > 10
    assert [name for name in beside if f"]({name})" not in texts["ARCHITECTURE.md"]] == []
    assert [name for name in beside if f'"../../{name}"' not in texts["docs/inside/decisions.md"]] == []
    architecture = texts["ARCHITECTURE.md"].split("\n## Decisions\n")[1].split("\n## ")[0]
    decisions = [part for name in beside for part in texts[name].split("\n## ")[1:]]
    decisions += architecture.split("\n### ")[1:]
    parts = ["*Context.*", "*Choice.*", "*Cost.*"]
    odd = [part.splitlines()[0] for part in decisions if re.findall(r"^\*\w+\.\*", part, re.MULTILINE) != parts]
    assert odd == []


def test_the_tower_is_drawn_as_it_is_enforced(texts: dict[str, str]) -> None:
    """The picture in ARCHITECTURE.md and the contracts of import-linter name the same modules in the same order.

    What is on the same layer (`a | b` in the contract) may have a line for each module in the picture.
    """
    contracts = tomllib.loads(texts["pyproject.toml"])["tool"]["importlinter"]["contracts"]
    picture = re.search(r"## The tower.*?```\n(.*?)```", texts["ARCHITECTURE.md"], re.DOTALL)
    assert picture is not None
    drawn = [re.split(r" {2,}", line.strip())[0] for line in picture[1].splitlines() if line.startswith("  ")]
    layers = [layer for contract in contracts if contract["type"] == "layers" for layer in contract["layers"]]
    assert " | ".join(drawn).split(" | ") == " | ".join(layers).split(" | ")


def test_no_text_names_a_package_that_no_index_has(texts: dict[str, str]) -> None:
    """Anybody could take the name: until there is a release, what is said to be installed is at hand."""
    named = {
        f"{name}: {line.strip()}"
        for name, text in texts.items()
        for line in text.splitlines()
        if re.search(r"pip3? install [^`]*\bpyspark-messagestore|['\"]pyspark-messagestore\[", line)
    }
    allowed = ("tests/connector/cli/test_without_cli.py:", "tests/test_house.py:", "pyproject.toml:")
    assert {each for each in named if not each.startswith(allowed)} == set()


def test_one_mode_of_the_crash_harness_needs_no_spark() -> None:
    def made(only: str) -> str:
        command = ["make", "-n", "crash", f"ARGS=--only {only}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "classes.jsa" in made("spark") and "classes.jsa" not in made("deliveries")
