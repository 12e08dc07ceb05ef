"""autoplan probe: what this machine can do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli import output, plans
from autoplan.errors import UsageError
from autoplan.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.probes.nodes import NodesProfile
    from autoplan.probes.profile import CollectiveReading, Device, HardwareProfile, Host
    from autoplan.record import Reading

Row = tuple[str, ...]
PLAIN = ("", "found", "from")
"""The headings of what is no matrix: a name, a figure, where it comes from."""
COLLECTIVES = ("operation", "backend", "bus bandwidth", "latency")


def probe_command(
    json: output.JsonOption = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if the cache has this machine.")] = False,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda or cpu. Default: the GPUs, if the machine has any.", metavar="DEVICE"),
    ] = None,
    launcher: plans.LauncherOption = None,
    nodes: plans.NodesOption = None,
) -> None:
    """Measure what this machine can do.

    Measured are matrix products, attention, memory, transfers and kernel launches. The machine's limits and state are
    read. A second call answers from a cache. With --launcher: each node, and the links (docs/nodes.md).
    """
    if launcher is not None or nodes is not None:
        _probe_nodes(launcher, nodes, device, json)
        return
    from autoplan.probes.run import run_probes

    with output.progress("measuring this machine, some 12 s", once=True) as tell:
        profile = run_probes(device=device, fresh=fresh, on_progress=lambda doing: tell(f"measuring {doing}"))
    if json:
        sys.stdout.write(profile.model_dump_json(indent=2) + "\n")
        return
    show_profile(profile)


def _probe_nodes(launcher: str | None, nodes: str | None, device: str | None, json: bool) -> None:
    from autoplan.probes.nodes import probe_nodes

    if launcher is None or nodes is None:
        given_one = "--launcher" if nodes is None else "--nodes"
        raise UsageError(f"{given_one} was given alone", hint="Give both, for example --launcher slurm --nodes 2x8.")
    with output.progress("waiting for the nodes") as tell:
        found = probe_nodes(launcher, nodes, device=device, on_progress=tell)
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        show_nodes(found)


def show_nodes(found: NodesProfile) -> None:
    """The nodes and their links on stdout, and what is slow."""
    _show("Nodes", ("node", "device", "products", "memory bandwidth"), node_rows(found))
    _show("collectives over all ranks", COLLECTIVES, collective_rows(found.collectives))
    _show("links", ("nodes", "one message", "latency", "all-reduce, bus bandwidth"), link_rows(found))
    for kind, texts in (("slow", found.slow), ("note", found.notes)):
        for text in texts:
            output.say(f"{kind}: {text}", stderr=False)
    slow = "" if found.slow else "nothing is slower than its like; "
    output.say(f"{slow}{len(found.nodes)} nodes, {format_seconds(found.seconds_spent)}", stderr=False)


def node_rows(found: NodesProfile) -> Iterator[Row]:
    """(node, device, best products of each dtype, memory bandwidth) of each device."""
    from autoplan.probes.nodes import name_of

    for node in found.nodes:
        for device in node.profile.devices:
            if device.type != found.device:
                continue
            name = device.name if device.type == "cpu" else f"cuda:{device.index} {device.name}"
            rates = ", ".join(f"{dtype} {format_reading(rate)}" for dtype, rate in device.peak_flops_per_s.items())
            memory = device.memory_bandwidth_bytes_per_s
            yield name_of(node), name, rates or "not measured", "" if memory is None else format_reading(memory)


def link_rows(found: NodesProfile) -> Iterator[Row]:
    """(nodes, bandwidth of one message, its latency, bus bandwidth of an all-reduce over both) of each pair."""
    for link in found.links:
        one, all_ = link.reading("send_recv"), link.reading("all_reduce")
        yield (
            f"{link.a} - {link.b}",
            "not measured" if one is None else format_reading(one.busbw_bytes_per_s),
            "" if one is None else format_reading(one.latency_s),
            "not measured" if all_ is None else format_reading(all_.busbw_bytes_per_s),
        )


def show_profile(profile: HardwareProfile) -> None:
    """The profile on stdout: tables on a terminal, plain lines elsewhere."""
    _show("Host", PLAIN, host_rows(profile.host))
    for device in profile.devices:
        title = f"{'cpu' if device.type == 'cpu' else f'cuda:{device.index}'}: {device.name}"
        _show(title, PLAIN, device_rows(device))
        if device.operations:
            _show("matrix products", ("dtype", "best", "datasheet", "share", "in training"), peak_rows(device))
            _show("attention, forward and backward", ("dtype", "shape", "sdpa", "eager"), attention_rows(device))
    rows = [(f"{k.a} - {k.b}", k.kind, format_reading(k.bandwidth_bytes_per_s), k.detail) for k in profile.links]
    _show("links, one direction, datasheet", ("ends", "kind", "bandwidth", "detail"), rows)
    _show("collectives", COLLECTIVES, collective_rows(profile.collectives))
    for note in (*profile.notes, *((profile.disturbed,) if profile.disturbed else ())):
        output.say(f"note: {note}", stderr=False)
    output.say(f"profile {profile.fingerprint}, {format_seconds(profile.seconds_spent)}", stderr=False)


def collective_rows(collectives: Sequence[CollectiveReading]) -> list[Row]:
    """(operation and ranks, backend, bus bandwidth, latency) of each."""
    return [
        (f"{c.operation} x{c.group_size}", c.backend, format_reading(c.busbw_bytes_per_s), format_reading(c.latency_s))
        for c in collectives
    ]


def host_rows(host: Host) -> list[Row]:
    """(what, value, where from) of the host."""
    cores = f"{host.cores_usable} usable of {host.cores_logical} ({host.cores_physical} physical)"
    driver = f"driver {host.driver}" if host.driver else "no GPU driver"
    versions = f"{driver}, CUDA {host.cuda}" if host.cuda else driver
    return [
        ("cpu", host.cpu_model, " ".join(host.cpu_flags)),
        ("cores", cores, f"{host.numa_nodes} NUMA node(s)"),
        ("memory", *_figure(host.memory_total_bytes)),
        ("memory available", *_figure(host.memory_available_bytes)),
        ("memory limit", *_figure(host.cgroup_memory_limit_bytes)),
        ("cpu limit", *_figure(host.cgroup_cpu_limit)),
        ("/dev/shm", *_figure(host.shared_memory_bytes)),
        ("load", *_figure(host.load_average)),
        ("software", f"{host.kernel}, Python {host.python}, torch {host.torch}", versions),
    ]


def device_rows(device: Device) -> Iterator[Row]:
    """(what, value, where from) of a device; what is empty is left out."""
    yield "memory", *_figure(device.memory_total_bytes)
    yield "memory available", *_figure(device.memory_available_bytes)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if bandwidth is not None:
        share = format_share(bandwidth, device.datasheet_memory_bandwidth_bytes_per_s)
        text = format_reading(bandwidth) + (f", {share} of the datasheet" if share else "")
        yield "memory bandwidth", text, bandwidth.source
    for way, readings in (
        ("host to device", device.host_to_device_bytes_per_s),
        ("device to host", device.device_to_host_bytes_per_s),
    ):
        for kind, reading in readings.items():
            yield f"{way}, {kind}", format_reading(reading), reading.source
    if device.kernel_launch_s is not None:
        what = "kernel launch" if device.type == "cuda" else "dispatch"
        yield what, format_reading(device.kernel_launch_s), device.kernel_launch_s.source
    for name, reading in device.state.items():
        yield name.replace("_", " "), _state(reading), reading.reason or reading.source
    if device.throttle_reasons:
        yield "slowed down by", ", ".join(device.throttle_reasons), ""
    for process in device.other_processes:
        yield "also in use by", process, ""


def peak_rows(device: Device) -> Iterator[Row]:
    """(dtype, best matmul, datasheet, share of it, best Linear forward and backward) per dtype."""
    for dtype in dict.fromkeys((*device.peak_flops_per_s, *device.datasheet_peak_flops_per_s)):
        measured = device.peak_flops_per_s.get(dtype)
        printed = device.datasheet_peak_flops_per_s.get(dtype)
        training = device.best_rate("linear_train", dtype)
        yield (
            dtype,
            format_reading(measured) if measured else "not measured",
            format_reading(printed) if printed else "unknown",
            format_share(measured, printed),
            _scaled(training, "FLOP/s") if training is not None else "not measured",
        )


def attention_rows(device: Device) -> Iterator[Row]:
    """(dtype, shape, sdpa, eager) per dtype and shape."""
    both = ("sdpa_train", "eager_attention_train")
    cases = dict.fromkeys((o.dtype, o.shape) for o in device.operations if o.kind in both)
    for dtype, shape in cases:
        times = [
            next((format_reading(o.seconds) for o in device.readings(kind, dtype) if o.shape == shape), "not measured")
            for kind in both
        ]
        yield dtype, "x".join(map(str, shape)), *times


def format_reading(reading: Reading) -> str:
    """ "415 GFLOP/s", "30.1 GB/s", "1.8 ms", with the spread where it is known; the reason where there is no value."""
    if reading.value is None:
        return f"unknown ({reading.reason})"
    rate_unit = "FLOP/s" if reading.unit == "flop/s" else "B/s"
    text = format_seconds(reading.value) if reading.unit == "s" else _scaled(reading.value, rate_unit)
    return text if reading.spread is None else f"{text} ± {reading.spread / 2:.0%}"


def format_share(measured: Reading | None, printed: Reading | None) -> str:
    """The measured rate as a share of the datasheet's; empty where either is unknown."""
    if measured is None or printed is None or measured.value is None or not printed.value:
        return ""
    return f"{measured.value / printed.value:.0%}"


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{format_number(value / scale)} {prefix}{unit}"
    return f"{format_number(value)} {unit}"


def _figure(reading: Reading) -> tuple[str, str]:
    """A size or a number, and where it is from."""
    words = format_bytes if reading.unit == "bytes" else format_number
    return ("none known" if reading.value is None else words(reading.value)), reading.reason or reading.source


def _state(reading: Reading) -> str:
    if reading.value is None:
        return "unknown"
    if reading.unit == "Hz":
        return f"{reading.value / 1e6:.0f} MHz"
    return f"{reading.value:.0%}" if reading.unit == "1" else f"{format_number(reading.value)} {reading.unit}"


def _show(title: str, headings: Row, rows: Iterable[Row]) -> None:
    from autoplan.report import facts, terminal

    terminal.show_table(output.console(stderr=False), facts.Rows(headings, list(rows)), title=title)
