"""The ops of a step are measured in both phases, and get their mean seconds under the traffic.

A step of decoding takes a token of each sequence of a group, and reads every weight for them. A step of prefill takes tokens of
prompts beside such tokens. So a plan is cut for the seconds of both, each as often as it comes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, isinf

from autosplit.backends.conformance import keeps_states
from autosplit.deploying.setup import Setup
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import affinity
from autosplit.errors import UsageError
from autosplit.generating.hostcost import FREE, MOST_US, HostTime, measure_host
from autosplit.generating.rewriting import EMBEDDED
from autosplit.generating.steps import TOKENS, StepFamily
from autosplit.measuring.links import MAX_DEVICES
from autosplit.progress import progress_shown
from autosplit.shapes.profiles import with_fewer_bytes
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import HOST, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Shapes, Traffic, sizes_text


@dataclass(frozen=True, repr=False)
class PhaseProfile(Profile):
    """The mean seconds of each op under the traffic of a generator.

    Attributes:
        phases: tokens of a step to its own measurements.
        host_s: the host's processor time for a step (see ``hostcost``). In these measurements taking an answer costs nothing:
            the host works while a device waits for it (see ``forecast.simulated``).
        start_s: its processor time before the first step of sequences that come at once.
    """

    phases: Mapping[int, Profile] = field(default_factory=dict)
    host_s: float = 0.0
    start_s: float = 0.0


def demands_of(constraints: Constraints | None) -> Constraints:
    """The demands on the plan of a generator: no stage has replicas of its own, as a sequence stays in one pipeline.

    The planner is asked for the fewest seconds of a stage; ``choosing`` knows the objective.

    Raises: UsageError: a limit of the latency of a request is given.
    """
    wanted = constraints or Constraints()
    if wanted.max_latency_s != inf:
        raise UsageError(
            "a generator has limits on its tokens in place of max_latency: --generate per_token_s=0.05,first_token_s=2"
        )
    return replace(wanted, objective="throughput", max_replicas=1)


def require_caches_here(machine: Machine, setup: Setup) -> None:
    """Raises: UsageError: ``max_error``; a backend without caches; hosts or accelerators, as caches are in memory here."""
    setup.require_one_precision()
    named = () if setup.backends is None else setup.considered
    if without := ", ".join(f"'{one}'" for one in named if not keeps_states(one)):
        raise UsageError(
            f"{without} cannot run a generator: the attention of each layer writes to its cache, which such a backend may copy; "
            "name eager, onnxruntime or openvino"
        )
    elsewhere = "the hosts" if setup.hosts is not None else ", ".join(one.name for one in machine.devices if is_accelerator(one))
    if elsewhere:
        raise UsageError(f"the caches of a generator are in memory of this machine, for its cores; leave out {elsewhere}")


def num_groups_on(machine: Machine) -> int:
    """The groups into which the sequences of a generator are divided, where it uses all devices of a machine."""
    return len(machine.layouts[0].devices)


def measure_phases(
    family: StepFamily, traffic: Traffic | None, machine: Machine, setup: Setup, measure: Callable[..., list[Profile]]
) -> PhaseProfile:
    """The mean seconds of each op under the traffic, of measurements at each of its numbers of tokens, in the same rounds.

    Args:
        family: the steps.
        traffic: how often each number of tokens comes; None for that of the family's sequences, divided among all devices.
        machine: the devices.
        setup: as for ``measure``.
        measure: ``profiling.profiles_of``.
    Raises: UsageError: as ``require_caches_here``, or a number of tokens is not allowed. Others as ``measure`` and
        ``measure_host``.
    """
    require_caches_here(machine, setup)
    flow = (traffic or traffic_on(family, machine)).verify(family.allowed)
    with progress_shown(setup.progress) as progress:
        setup = replace(setup, progress=progress)
        sizes = _measured_at(family, flow)
        phases = dict(zip(sizes, measure([family.at({TOKENS: tokens}) for tokens in sizes], machine, setup), strict=True))
        progress("profile", 1.0, "timing the host")
        host = _host_time(family, machine, phases)
    return mixed_phases(family, phases, flow, host)


def _host_time(family: StepFamily, machine: Machine, phases: Mapping[int, Profile]) -> HostTime:
    """The host's processor time, while the devices compute steps as long as those of decoding."""
    decoding = phases[min(phases)]
    step_s = min(decoding.whole_s(*setting) for setting in decoding.measured)
    here = affinity()
    cores = [f"cpu:{device.cores[0]}" for device in machine.layouts[0].devices if device.cores and device.cores[0] in here]
    most_us = MOST_US if isinf(step_s) else round(1e6 * step_s)
    group = family.sequences.largest_group(num_groups_on(machine))
    row_size = family.at(family.largest).specs[EMBEDDED].shape[-1] if family.table else 0
    return measure_host(tuple(cores[:MAX_DEVICES]) or (f"cpu:{here[0]}",), group, most_us, row_size)


def stored_phases(family: StepFamily, machine: Machine, stored: Callable[[Traced], Profile | None]) -> PhaseProfile | None:
    """The stored profiles of both phases under the family's own traffic; None if one is missing."""
    flow = traffic_on(family, machine).verify(family.allowed)
    found = {tokens: stored(family.at({TOKENS: tokens})) for tokens in _measured_at(family, flow)}
    phases = {tokens: profile for tokens, profile in found.items() if profile is not None}
    return mixed_phases(family, phases, flow, _host_time(family, machine, phases)) if len(phases) == len(found) else None


def _measured_at(family: StepFamily, traffic: Traffic) -> list[int]:
    """The numbers of tokens at which a step is measured: those that come, and the most, of which a plan names the graph.

    A plan on one device decodes a token of all sequences at once. That is measured too: a line from smaller steps of decoding to
    prompts, which read one cache for many tokens, is much too low there. So is the smallest step with prompts, as it reads
    weights in another form: on the line from decoding to the largest step, 32 tokens took 18.5 ms in place of 23 (25 M
    parameters, 8 sequences).
    """
    most, usual = family.sequences.max_sequences, (tokens for (tokens,) in traffic.shares)
    smallest = next(size for size in family.allowed[TOKENS] if size > most)
    return sorted({family.largest[TOKENS], smallest, most, *usual}, reverse=True)


def traffic_on(family: StepFamily, machine: Machine) -> Traffic:
    """How often steps of each number of tokens come on all devices of a machine, where a new sequence follows each that ends.

    In the time of one sequence each group has ``new`` steps, and all prompts are computed once: a step of the largest size takes
    a token of each sequence of a group and tokens of prompts for the rest, or rows of sources of an encoder.
    """
    sequences, sizes, num_groups = family.sequences, family.allowed[TOKENS], num_groups_on(machine)
    group, largest = sequences.largest_group(num_groups), family.largest[TOKENS]
    each, room = sequences.prompt, largest - group
    if family.source is not None:
        each = family.source.num_rows(sequences.prompt)
        largest = next(size for size in sizes if size - sequences.max_sequences >= each)
        room = largest - sequences.max_sequences
    num_prefills = sequences.max_sequences * each / room
    at = next(size for size in sizes if size >= group)
    return Traffic((TOKENS,), {(at,): max(num_groups * sequences.new - num_prefills, 0.0), (largest,): num_prefills})


def mixed_phases(family: StepFamily, phases: Mapping[int, Profile], traffic: Traffic, host: HostTime = FREE) -> PhaseProfile:
    """The profile of the largest step with the mean seconds of each op; settings that one phase lacks are left out.

    Args:
        family: the steps.
        phases: tokens of a step to its measurements.
        traffic: how often each comes.
        host: the host's processor time.
    """
    phases = {tokens: _without_host(profile) for tokens, profile in phases.items()}
    shares = dict.fromkeys(phases, 0.0) | {tokens: share for (tokens,), share in traffic.shares.items()}
    num_bytes = {one: sum(value.num_bytes for value in family.at({TOKENS: one}).graph.values.values()) for one in phases}
    byte_shares = {tokens: shares[tokens] * num_bytes[tokens] / max(num_bytes.values()) for tokens in phases}
    profile = with_fewer_bytes(phases[family.largest[TOKENS]], sum(byte_shares.values()))
    settings = [setting for setting in profile.measured if all(setting in one.measured for one in phases.values())]
    profile = replace(profile, measured={one: _mixed_in(one, phases, shares, byte_shares) for one in settings}, stages=())
    shapes = Shapes(
        {name: dict(axes) for name, axes in family.shapes.items()},
        {TOKENS: sizes_text(family.allowed[TOKENS])},
        {TOKENS: tuple(family.allowed[TOKENS])},
        unpaddable=dict(family.unpaddable),
    )
    parts = {one.name: getattr(profile, one.name) for one in fields(Profile)}
    return PhaseProfile(**{**parts, "shapes": shapes}, phases=phases, host_s=host.step_s, start_s=host.start_s).verify()


def _without_host(profile: Profile) -> Profile:
    """The profile in which taking an answer costs the host nothing."""
    links = [link for link in profile.links if link.target == HOST]
    return profile.with_links(replace(link, receive_s=0.0, cold_receive_s=0.0) for link in links)


def _mixed_in(
    setting: Setting, phases: Mapping[int, Profile], shares: Mapping[int, float], byte_shares: Mapping[int, float]
) -> Measured:
    """The means in one setting, those of a cut per byte of the largest step; an op that is refused in one phase is refused."""
    largest, refused = phases[max(phases)].measured[setting], dict[str, str]()
    for profile in phases.values():
        refused |= profile.measured[setting].refused

    def mean_s(seconds: Callable[[Profile], float]) -> Samples:
        return Samples((sum(shares[tokens] * seconds(profile) for tokens, profile in phases.items()),))

    kept = [op for op in phases[max(phases)].signatures if op not in refused]
    ops = {op: mean_s(lambda profile, op=op: profile.op_s(op, *setting)) for op in kept}  # type: ignore[misc]
    cuts = {tokens: profile.measured[setting].cut_s_per_byte for tokens, profile in phases.items()}
    return replace(
        largest,
        ops=ops,
        per="op",
        whole=Samples((sum(samples.median_s for samples in ops.values()),)),
        alone=None if refused else mean_s(lambda profile: profile.whole_s(*setting, busy=False)),
        refused=refused,
        cut_s_per_byte=None if None in cuts.values() else sum(byte_shares[tokens] * (cuts[tokens] or 0.0) for tokens in cuts),
    )
