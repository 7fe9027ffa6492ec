"""Asks for one way out after another and writes down everything that arrives, down to the last byte."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from hostile.client_app import model

app = ServerApp()


def described(reply):
    if reply.has_error():
        return {"error": reply.error.reason, "code": reply.error.code}
    out = {"type": reply.metadata.message_type, "group": reply.metadata.group_id, "records": list(reply.content)}
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            out["arrays"] = {n: a.numpy().flatten().tolist() for n, a in record.items()}
        else:
            out[name] = {k: str(v) for k, v in record.items()}
    return out


@app.main()
def main(grid: Grid, context):
    nodes = []
    while not nodes:
        nodes = list(grid.get_node_ids())
    torch.manual_seed(0)
    state = model().state_dict()
    found = {}
    for way in str(context.run_config["ways"]).split(","):
        content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"way": way})})
        ask = Message(content, dst_node_id=nodes[0], message_type="train", group_id="1")
        replies = list(grid.send_and_receive([ask], timeout=90))
        found[way] = described(replies[0]) if replies else {"error": "no reply"}
        found[way]["sent"] = {n: v.flatten().tolist() for n, v in state.items()}
    Path(str(context.run_config["out"])).write_text(json.dumps(found))
