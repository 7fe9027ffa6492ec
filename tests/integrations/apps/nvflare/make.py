"""Exports or simulates a job: `make.py export|simulate FOLDER OUT WAY [own] [external] [crafted=FILE] [site=FILE] [rounds=N]`."""

import sys
from pathlib import Path

from net import Net
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from qbi.integrations.nvflare import RecordedResults, RecordedTasks, SiteData, SiteResults

HERE = Path(__file__).parent
how, folder, out, way, *rest = sys.argv[1:]
named = dict(word.split("=") for word in rest if "=" in word)
recipe = FedAvgRecipe(
    name=way,
    model=Net(),
    min_clients=2,
    num_rounds=int(named.get("rounds", 1)),
    train_script=str(HERE / "script.py"),
    train_args=way,
    launch_external_process="external" in rest,
    command=f"{sys.executable} -u",
)
recipe.add_client_file(str(HERE / "net.py"))
recipe.add_server_output_filter(RecordedTasks(out, named.get("crafted", "")), tasks=["train"])
recipe.add_server_input_filter(RecordedResults(out), tasks=["train"])
if "own" in rest:
    recipe.add_client_output_filter(PercentilePrivacy(percentile=0, gamma=100.0), tasks=["train"])
if "site" in named:
    recipe.add_client_input_filter(SiteData(named["site"]), tasks=["train"])
    recipe.add_client_output_filter(SiteResults(named["site"]), tasks=["train"])
if how == "export":
    recipe.export(folder)
else:
    recipe.execute(SimEnv(num_clients=2, workspace_root=folder))
