"""One self-contained HTML page about a search: the topology, the table of plans, the reason for the best one, and its timeline.

    save_plan_page(result, cost_model, "plan.html")

Nothing is loaded from elsewhere: no scripts, no fonts, and the picture is in the page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.plan_table import (
    HEADINGS,
    describe_left_out,
    describe_memory,
    describe_task,
    format_bytes,
    prediction_cells,
)
from lightning_holmes.plan.search import SearchResult
from lightning_holmes.plan.timeline_plot import timeline_svg

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; text-align: left; white-space: pre-line; vertical-align: top; }
tr.best td { background: #e8f4ea; font-weight: 600; }
svg { width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { background: #fff; } }
"""


def plan_page(result: SearchResult, cost_model: CostModel) -> str:
    """The page's HTML."""
    rows = []
    for entry in (result.best, *result.runners_up):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in prediction_cells(entry))
        best = ' class="best"' if entry is result.best else ""
        rows.append(f"<tr{best}>{cells}</tr>")
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    others = "".join(f"<li>{escape(f'{entry.run}: {entry.reason}')}</li>" for entry in result.runners_up)
    memory = f"<p><strong>{escape(describe_memory(result.memory_note))}</strong></p>\n" if result.memory_note else ""
    links = "".join(f"<p>{escape(note)}</p>\n" for note in cost_model.network.link_notes())
    picture = timeline_svg([result.best.timeline], title=str(result.best.run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lightning-holmes plan</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Plan</h1>\n<p>{escape(describe_task(cost_model))}</p>\n"
        f"{memory}<h2>Topology</h2>\n{_topology_tables(cost_model)}\n"
        f"<h2>Plans, the best first</h2>\n<table><tr>{headings}</tr>\n{chr(10).join(rows)}</table>\n"
        f'<p>Chosen: {escape(f"{result.best.run}: {result.best.reason}")}</p>\n<ol start="2">{others}</ol>\n'
        f"{links}<p>{escape(describe_left_out(result))}</p>\n<h2>One step of the best plan</h2>\n{picture}\n</body></html>\n"
    )


def save_plan_page(result: SearchResult, cost_model: CostModel, path: str | Path) -> None:
    """Write the page to a file. Raises ConfigurationError if it cannot be written."""
    try:
        Path(path).write_text(plan_page(result, cost_model), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"html {str(path)!r} cannot be written: {error}") from error


def _topology_tables(cost_model: CostModel) -> str:
    topology = cost_model.network.topology
    rows = []
    devices_of = iter(cost_model.host_devices)
    for cluster in topology.clusters:
        alike: dict[tuple[str, str], int] = {}
        for host in cluster.hosts:
            devices = f"{host.devices} x {next(devices_of).name}"
            cards = ", ".join(
                f"{nic.name} ({nic.kind}{f', {format_bytes(nic.bandwidth_bytes_per_s)}/s' if nic.bandwidth_bytes_per_s else ''})"
                for nic in host.nics
            )
            alike[devices, cards] = alike.get((devices, cards), 0) + 1
        for (devices, cards), count in alike.items():
            cells = (cluster.name, str(count), devices, cards or "not given")
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    text = f"<table><tr><th>cluster</th><th>hosts</th><th>devices a host</th><th>network cards</th></tr>{''.join(rows)}</table>"
    if topology.links:
        links = "".join(
            f"<tr><td>{escape(' and '.join(link.ends))}</td><td>{escape(link.transport)}</td>"
            f"<td>{format_bytes(link.bandwidth_bytes_per_s)}/s</td><td>{link.latency_s * 1e3:.3g} ms</td></tr>"
            for link in topology.links
        )
        text += f"<table><tr><th>between</th><th>transport</th><th>bandwidth</th><th>latency</th></tr>{links}</table>"
    return text
