"""Break the code on purpose and see that a test notices: one line per mutant, exit status 1 if one survives.

Each mutant is a single replacement in a copy of the tree. Run it with the project's Python:
``.venv/bin/python scripts/mutants.py [NAME …]``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One defect and the test file that must catch it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


MUTANTS = (
    Mutant(
        name="a KV edge is dropped",
        file="flashforward_core/graph/schedules.py",
        right="scene = range(spec.scene_start(chunk), chunk)",
        wrong="scene = range(spec.scene_start(chunk), chunk - 1)",
        test="tests/unit/test_schedules.py",
    ),
    Mutant(
        name="HiAR reads level s for s+1",
        file="flashforward_core/graph/schedules.py",
        right='Memory.OUTPUT_LEVEL: (stage + 1, f"stage{stage}")',
        wrong='Memory.OUTPUT_LEVEL: (stage, f"stage{stage}")',
        test="tests/unit/test_schedules.py",
    ),
    Mutant(
        name="an anchor too early in Γ",
        file="flashforward_core/graph/anchors.py",
        right="min(RULES[plan.rule](plan, frames), among.stop - size)",
        wrong="min(RULES[plan.rule](plan, frames) - 1, among.stop - size)",
        test="tests/unit/test_anchors.py",
    ),
    Mutant(
        name="noise without its latent frame",
        file="flashforward_core/flow.py",
        right='f"{seed}|{purpose}|{latent_frame}|{stage}"',
        wrong='f"{seed}|{purpose}|{stage}"',
        test="tests/unit/test_flow.py",
    ),
    Mutant(
        name="a page is released early",
        file="flashforward_core/kv/pages.py",
        right="needed = self.kept | (self.passing if use.published else 0)",
        wrong="needed = 0",
        test="tests/golden/test_engine_equals_reference.py",
    ),
    Mutant(
        name="the role is ignored",
        file="flashforward_core/model/transformer.py",
        right="return time_BFC + rows[segments[0].role.row]",
        wrong="return time_BFC + rows[0]",
        test="tests/golden/test_transformer_parity.py",
    ),
    Mutant(
        name="RoPE is off by one chunk",
        file="flashforward_core/engine/ops.py",
        right="frames=state.lane.ops.put(torch.tensor(frames)),",
        wrong="frames=state.lane.ops.put(torch.tensor(frames) + 3 * (task.role is Role.RENDERER)),",
        test="tests/golden/test_engine_equals_reference.py",
    ),
    Mutant(
        name="a lane of another machine is sent what it has",
        file="flashforward_core/engine/shares.py",
        right="here.update(missing, task.writes)",
        wrong="here.update(missing)",
        test="tests/property/test_shares.py",
    ),
    Mutant(
        name="neighbouring lanes are on different machines",
        file="flashforward_core/engine/ray_lanes.py",
        right="nodes[placed * len(nodes) // cpus]",
        wrong="nodes[placed % len(nodes)]",
        test="tests/unit/test_lane_worker.py",
    ),
    Mutant(
        name="a failed task's tensors are kept with its error",
        file="flashforward_core/engine/executor.py",
        right="traceback.clear_frames(error.__traceback__)",
        wrong="pass",
        test="tests/unit/test_out_of_memory.py",
    ),
    Mutant(
        name="a lane begins with a number of threads of its own",
        file="flashforward_core/engine/lanes.py",
        right="torch.get_num_threads()  # a new",
        wrong="# a new",
        test="tests/unit/test_lanes.py::test_lanes_compute_with_the_number_of_threads_that_the_process_was_given",
    ),
)


def copy_tree(target: Path) -> None:
    """Copy everything that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def survives(mutant: Mutant, tree: Path) -> bool:
    """Plant ``mutant`` in ``tree``, run its test, take it out again; whether the test stayed green."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} must hold once: {mutant.right}")
    path.write_text(text.replace(mutant.right, mutant.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # two at once must not fight over the cores
    result = subprocess.run(command, cwd=tree, capture_output=True, check=False, text=True, env=environment)
    path.write_text(text)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest could not run:\n{result.stdout}{result.stderr}")
    return result.returncode == 0


def count_survivors(mutants: Sequence[Mutant]) -> int:
    """Try ``mutants`` one after another in a tree of their own; say what becomes of each."""
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutant in mutants:
            alive = survives(mutant, tree)
            print(f"{'SURVIVES' if alive else 'caught'}: {mutant.name} ({mutant.test})", flush=True)
            left += alive
    return left


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        left = sum(pool.map(count_survivors, (chosen[start::AT_ONCE] for start in range(AT_ONCE))))
    print(f"{len(chosen) - left} of {len(chosen)} mutants caught")
    return 1 if left or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
