"""What a plan will do, in words."""

from flashforward_core.commands.simulate import predict
from flashforward_core.model.roles import Backbone

from .sockets import PlanValue


def describe(plan: PlanValue, backbone: Backbone) -> str:
    """Say length, forwards, rounds, seconds and KV memory, one fact a line; nothing runs."""
    spec, shape, devices = plan.spec, plan.spec.shape, plan.devices.resolve()
    graph, placement, timeline = predict(
        spec,
        config=backbone.config,
        devices=len(devices),
        layout=plan.devices.layout,
        order=plan.devices.order,
        cost=None,  # none has been fitted for this machine
    )
    counts = graph.counts()
    planner = counts["planner_denoise"] + counts["planner_commit"]
    predicted = "unknown (not measured)" if timeline.predicted_s is None else f"{timeline.predicted_s:.1f} s"
    anchors = f", anchors: {len(spec.anchor_positions())}" if spec.anchors is not None else ""
    lines = [
        f"{shape.width}x{shape.height}, {shape.seconds:.2f} s: {shape.video_frames} frames at {shape.fps:g} fps",
        f"{shape.latent_frames} latent frames in {spec.num_chunks} chunks{anchors}",
        f"{spec.schedule}: {counts['total']} forwards ({planner} planner, {counts['total'] - planner} renderer)",
        f"{', '.join(devices)}: layout {placement.layout}, {timeline.rounds:g} rounds",
        f"predicted time: {predicted}; KV at most {max(timeline.peak_kv_bytes) / 2**20:.0f} MiB on a device",
    ]
    return "\n".join(lines)
