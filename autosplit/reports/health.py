"""Health of a host as rows for tables. No torch.

The counters of a host begin at its start, so the difference of two readings covers the time between them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Health = Mapping[str, Any]
Row = dict[str, Any]


def device_rows(health: Health) -> list[Row]:
    """One row a device: its state, its memory, and the stages on it."""
    return [
        {
            "device": name,
            "state": device["state"],
            "used_bytes": device["used_bytes"],
            "free_bytes": device["free_bytes"],
            "resident_bytes": device["resident_bytes"],
            "stages": " ".join(device["stages"]),
        }
        for name, device in health["devices"].items()
    ]


def network_rows(health: Health, before: Health | None = None, elapsed_s: float = 0.0) -> list[Row]:
    """One row a network.

    Args:
        before: an earlier reading, for the requests answered since.
        elapsed_s: seconds between the two.
    """
    rows = []
    for name, network in health["networks"].items():
        known = "num_answered" in network
        earlier = before["networks"].get(name, {}).get("num_answered") if before else None
        rate = (network["num_answered"] - earlier) / elapsed_s if known and earlier is not None and elapsed_s > 0 else None
        latency_s = network.get("latency_s", {})
        rows.append(
            {
                "network": name,
                "state": network["state"],
                "waiting": _waiting_text(network) if known else "-",
                "running": f"{network['num_running']} of {network['window']}" if known else "-",
                "answered": network.get("num_answered"),
                "requests_per_s": rate,
                **{f"{quantile}_s": latency_s.get(quantile) or None for quantile in ("p50", "p90", "p99")},
                "rows": network.get("rows_per_request"),
                "restarts": network.get("restarts"),
            }
        )
    return rows


def worker_rows(health: Health, before: Health | None = None) -> list[Row]:
    """One row a worker: its state, and the mean seconds of a request.

    Args:
        before: an earlier reading; only requests since then count.
    """
    old = {_key(worker): worker for worker in before["workers"]} if before else {}
    rows = []
    for worker in health["workers"]:
        earlier = old.get(_key(worker), {})
        spent = {key: worker[key] - earlier.get(key, 0) for key in ("busy_s", "wait_s", "transfer_s", "queue_s", "num_requests")}
        count = spent["num_requests"] or float("nan")
        total_s = spent["busy_s"] + spent["wait_s"] + spent["transfer_s"]
        rows.append(
            {
                "network": worker["network"],
                "stage": f"{worker['stage']}.{worker['replica']}",
                "device": worker["device"],
                "state": worker["state"],
                "for_s": worker["since_s"],
                "requests": spent["num_requests"],
                "queued": worker["num_queued"],
                "busy": spent["busy_s"] / total_s if total_s else float("nan"),
                "compute_s": spent["busy_s"] / count,
                "queue_s": spent["queue_s"] / count,
                "transfer_s": spent["transfer_s"] / count,
                "rows": health["networks"][worker["network"]].get("rows_per_request"),
                "resident_bytes": worker["resident_bytes"],
            }
        )
    return rows


def at_work(health: Health, before: Health | None) -> Health:
    """The part of a reading about networks that answered requests since the earlier reading; all of it if none did."""
    networks = health["networks"]
    counts = {name: network.get("num_answered", 0) for name, network in (before or {"networks": {}})["networks"].items()}
    busy = [name for name, network in networks.items() if network.get("num_answered", 0) > counts.get(name, 0)] or list(networks)
    workers = [worker for worker in health["workers"] if worker["network"] in busy]
    return {**health, "networks": {name: networks[name] for name in busy}, "workers": workers}


def _waiting_text(network: Health) -> str:
    """Requests in the admission queue and its room, and those that wait beside it in memory of their callers."""
    held = f" + {network['num_held']} held" if network["num_held"] else ""
    return f"{network['num_waiting']} of {network['room']}{held}"


def _key(worker: Mapping[str, Any]) -> Sequence[Any]:
    return worker["network"], worker["stage"], worker["replica"]
