"""One command for the simulator, one for real processes: `python run.py simulation`, `python run.py deployment`."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from safetensors.torch import save_file
from task import SHAPE, Net, load_data

from qbi import QBI, mount
from qbi.attacks import Mounted, Reading
from qbi.data.checkpoint import load_parameters
from qbi.extraction import difference_rounding, weight_difference
from qbi.integrations.nvflare import RecordedResults, RecordedTasks, SiteData, SiteResults, job_digest
from qbi.integrations.nvflare.deployment import LocalSites
from qbi.randomness import generator
from qbi.records import Update

HERE = Path(__file__).parent
OWNER = 'policy = "private"\nmetrics = ["loss:8:10"]\ninspect = "{inspect}"\n'


def made(chosen: argparse.Namespace, work: Path, crafted: Path | None) -> FedAvgRecipe:
    """The job: NVFlare's FedAvg, the script, and a server that writes down what it sends and gets."""
    script = "plain.py" if chosen.no_guard else "client.py"
    rate = 1.0 if chosen.attack and chosen.no_guard else chosen.rate or (0.05 if chosen.no_guard else 0.2)
    words = f"--model {chosen.model} --steps {1 if chosen.attack else 0} --rate {rate}"
    recipe = FedAvgRecipe(
        name="guarded",
        model=Net(chosen.model, chosen.seed),
        min_clients=chosen.clients,
        num_rounds=1 if chosen.attack else chosen.rounds,
        train_script=str(HERE / script),
        train_args=f"{words} --batch {chosen.batch} --images {chosen.images} --seed {chosen.seed}",
    )
    recipe.add_client_file(str(HERE / "task.py"))
    recipe.add_server_output_filter(RecordedTasks(str(work), str(crafted or "")), tasks=["train"])
    recipe.add_server_input_filter(RecordedResults(str(work)), tasks=["train"])
    return recipe


def mounted(chosen: argparse.Namespace) -> Mounted | None:
    """A crafted model, for one's own test clients."""
    if not chosen.attack:
        return None
    sample = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    return mount(Net(chosen.model), QBI(20), sample, generator(0, "nvflare"))


def found(work: Path, crafted: Mounted | None) -> list[dict]:
    """What each reply would give away: candidates that several rows agree on."""
    out = []
    for place in sorted(work.glob("site-*-0.json")):
        reply = place.with_suffix(".safetensors")
        entry = {"site": place.stem.removesuffix("-0"), "answered": reply.exists(), "agree": 0}
        if crafted is not None and reply.exists():
            sent, back = load_parameters(work / "sent-0.safetensors"), load_parameters(reply)
            moved = weight_difference(sent, back)
            rounding = difference_rounding(crafted.target.weight.detach(), moved[f"{crafted.layer}.weight"])
            read = crafted.read(Update(moved, back, 0, float("nan")), Reading(rounding=rounding))
            entry["agree"] = int((read.support > 1).sum())
        out.append(entry)
    return out


def accuracy(work: Path, kind: str, seed: int) -> float:
    """Of the mean of the last replies, on images that no site has."""
    last = max(int(p.stem.rsplit("-", 1)[1]) for p in work.glob("site-1-*.safetensors"))
    states = [load_parameters(p) for p in sorted(work.glob(f"site-*-{last}.safetensors"))]
    model = Net(kind)
    model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
    x, y = load_data(0, 1500, seed)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def main() -> None:
    """Run the example once and say what was read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["simulation", "deployment"])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--attack", choices=["", "qbi"], default="")
    parser.add_argument("--no-guard", action="store_true", help="sites without a policy, and plain training")
    parser.add_argument(
        "--inspect", choices=["refuse", "warn"], default="refuse", help="what owners do about a crafted model"
    )
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--images", type=int, default=40, help="of each site")
    parser.add_argument("--rate", type=float, default=0.0, help="default: one for plain and one for private training")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, and of which site has which images")
    parser.add_argument("--out", type=Path, default=Path("out/nvflare"))
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*-[0-9]*.*"):
        old.unlink()
    crafted = mounted(chosen)
    place = out / "crafted.safetensors"
    if crafted is not None:
        save_file({n: v.contiguous() for n, v in crafted.model.state_dict().items()}, place)
    recipe = made(chosen, out, place if crafted is not None else None)
    owner = None if chosen.no_guard else OWNER.format(inspect=chosen.inspect)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.how == "simulation":
            ended = simulated(recipe, chosen, Path(folder), owner)
        else:
            recipe.export(folder)
            job = Path(folder) / "guarded"
            # The owner has read the job, and writes down which it was.
            digest = job_digest(job / "app")
            with LocalSites(chosen.clients, owner and f'{owner}reviewed = ["{digest}"]\n') as sites:
                ended = sites.run(job, within=300.0)
    read = found(out, crafted)
    right = (
        accuracy(out, chosen.model, chosen.seed) if os.environ.get("QBI_EXAMPLE_DATA") and not chosen.attack else None
    )
    (out / "federation.json").write_text(json.dumps({"ended": ended, "sites": read, "accuracy": right}, indent=1))
    print(f"{ended}; {read}; accuracy {right}; results in {chosen.out}")


def simulated(recipe: FedAvgRecipe, chosen: argparse.Namespace, folder: Path, owner: str | None) -> str:
    """The simulator never runs a site's filters, so the job carries them."""
    if owner is not None:
        site = folder / "qbi-site.toml"
        # One ledger for all simulated sites, so one limit for all of them.
        site.write_text(f'ledger = "sites.ledger"\nlimit = {2000 * chosen.clients}\n{owner}')
        os.environ["QBI_SITE"] = str(site)
        recipe.add_client_input_filter(SiteData(str(site)), tasks=["train"])
        recipe.add_client_output_filter(SiteResults(str(site)), tasks=["train"])
    try:
        recipe.execute(SimEnv(num_clients=chosen.clients, workspace_root=str(folder / "work")))
    except RuntimeError as problem:
        return f"ended early ({str(problem).splitlines()[0]})"
    return "completed"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; every process of the federation was ended.")
