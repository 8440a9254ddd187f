"""From a workflow as the frontend saves it to the prompt it queues, by what a host says of its nodes."""

from __future__ import annotations

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
NESTED = "COMFY_DYNAMICCOMBO_V3"
NOTES = {"Note", "MarkdownNote"}


def to_prompt(workflow: dict, nodes: dict) -> dict:
    """`nodes`: the host's /object_info. Widgets take the saved values in order; those without one their defaults."""
    links = {number: [str(source), slot] for number, source, slot, *_ in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        linked = {entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        inputs: dict = {}
        _fill(inputs, nodes[node["type"]]["input"], list(node.get("widgets_values") or []), "")
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs | linked}
    return prompt


def _fill(inputs: dict, spec: dict, values: list, prefix: str) -> None:
    for name, (kind, *rest) in {**spec.get("required", {}), **spec.get("optional", {})}.items():
        options = rest[0] if rest else {}
        choices = kind if isinstance(kind, list) else options.get("options")
        # Widgets of several types, such as "FLOAT,INT", count as well.
        if isinstance(kind, str) and not WIDGETS.issuperset(kind.split(",")) and kind != NESTED:
            continue
        default = options.get("default")
        if kind == NESTED:
            default = choices[0]["key"]
        elif choices and default is None:
            default = choices[0]
        inputs[prefix + name] = value = values.pop(0) if values else default
        if kind == NESTED:
            chosen = next(option for option in choices if option["key"] == value)
            _fill(inputs, chosen["inputs"], values, f"{prefix}{name}.")
        if options.get("control_after_generate") and values:
            values.pop(0)
